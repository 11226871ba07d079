"""Every fault in every phase of a refit into two engines: it ends in time, nobody serves a mixture or a version that
was not sent, nothing is left behind, and the next refits heal.

``FAULTS_TABLE=FILE`` writes what became of each (`make faults`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.faults import FAULTS
from tests.process.fleet import WATCHDOG_S, Fleet
from tests.process.test_leaks import usage
from tests.process.warm import Warm

PHASES = ("begin", "stage", "pause", "load", "verify", "commit", "resume")
VICTIM = "engine-1"
NEEDS_PACKET_RULES = ("connection reset", "black hole", "1 % packet loss")

HEAD = """# Faults

What becomes of a refit into two engines when something fails while one of them, the victim, stands in a phase. All are
injected for real: signals, packet rules, limits, connections. `make faults` writes this page from a run of
`tests/process/test_faults.py`. Every CI run repeats them all, and fails where a refit has not ended after 30 s, where
an engine answers with weights that are not those of the version that it names, or names one that was not sent, where
the next refits do not bring all engines back, and where descriptors, threads or memory are left behind.

Each cell: what the refit came to (*all*: both engines have the version; *others*: the victim was left behind;
*failed*: the trainer got an error; *-*: there was no trainer left to say), and then what the victim served while the
fault was still there: *old*, *new*, or *nothing* (it refuses, is gone, or cannot be asked).

"""


@pytest.fixture(scope="module")
def fleets() -> Iterator[list[Fleet]]:
    made: list[Fleet] = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Path, warm: Warm, fleets: list[Fleet]) -> Fleet:
    if fleets and not fleets[-1].usable:
        fleets.pop().close()
    if not fleets:
        fleets.append(Fleet(tmp_path_factory.mktemp("fleet"), model, warm))
        fleets[-1].heal()
    fleets[-1].usable = False
    return fleets[-1]


@pytest.fixture(scope="module")
def table() -> Iterator[dict[tuple[str, str], str]]:
    """What became of each cell; printed, and written where it is asked for."""
    seen: dict[tuple[str, str], str] = {}
    yield seen
    lines = ["| fault | " + " | ".join(PHASES) + " |", "|---" * (1 + len(PHASES)) + "|"]
    lines += [f"| {fault} | " + " | ".join(seen.get((fault, phase), "") for phase in PHASES) + " |" for fault in FAULTS]
    if "FAULTS_TABLE" in os.environ:
        Path(os.environ["FAULTS_TABLE"]).write_text(HEAD + "\n".join(lines) + "\n")


def may_drop_packets() -> bool:
    command = ["iptables", "-w", "-S", "INPUT"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def came_to(answer: dict[str, Any]) -> str:
    if not answer:
        return "-"
    if "error" in answer:
        return "failed"
    return "others" if answer["left"] else "all"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(fleet: Fleet, table: dict[tuple[str, str], str], fault: str, phase: str) -> None:
    if fault in NEEDS_PACKET_RULES and not may_drop_packets():
        pytest.skip("needs iptables and the right to use it")
    victim = fleet.members[VICTIM]
    old = fleet.version
    victim.hold(phase)
    fleet.go()
    victim.await_held()
    with FAULTS[fault](fleet, victim):
        victim.release()
        answer = fleet.answer()
        served = {name: fleet.served(name) for name in fleet.members}
    result = came_to(answer)
    print(fault, phase, answer.get("error"), answer.get("text"), answer.get("seconds"))
    served_by_victim = {None: "nothing", old: "old", fleet.version: "new"}[served[VICTIM]]
    table[fault, phase] = f"{result}, {served_by_victim}"
    if result == "all":
        # One that may open no descriptor takes no connection either.
        assert set(served.values()) <= {fleet.version, None if fault == "no descriptors left" else fleet.version}
    elif result == "others":
        assert served["engine-0"] == fleet.version
    fleet.heal()
    assert {fleet.served(name) for name in fleet.members} == {fleet.version}
    fleet.usable = True


def test_nothing_is_left_of_all_that(fleet: Fleet) -> None:
    """The engine that was never the victim, and a trainer, have what they had before."""
    trainer = fleet.trainer.pid
    other = fleet.members["engine-0"].pid
    fleet.heal()
    before = {pid: usage(pid) for pid in (trainer, other)}
    victim = fleet.members[VICTIM]
    for fault, phase in (("engine killed", "load"), ("black hole", "stage"), ("second trainer", "pause")):
        if fault in NEEDS_PACKET_RULES and not may_drop_packets():
            continue
        victim.hold(phase)
        fleet.go()
        victim.await_held()
        with FAULTS[fault](fleet, victim):
            victim.release()
            fleet.answer()
        fleet.heal()
    for pid, counts in before.items():
        after = usage(pid)
        for what in ("fds", "threads"):
            assert after[what] <= counts[what] + 3, (what, counts, after)
        assert after["rss"] <= counts["rss"] + (16 << 20), (counts, after)


assert WATCHDOG_S == 30.0, "the page says so"
