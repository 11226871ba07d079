"""Under each profile, in each layout: what doctor says, what the plan chooses and what a refit really uses agree.

Real containers, hardened as those that ship, with the reference engine: see agreement.yaml. Prints one table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from syncstack.seccomp.expected import expected
from tests.compose.stack import ROOT, STARTED, check, run

FILE = ROOT / "tests" / "compose" / "agreement.yaml"
INSIDE = ("python", "/agreement_inside.py")

FOLDER, PID, NEITHER = LAYOUTS = ("shared folder", "shared PID namespace only", "neither")
# Trainer, engine, and the engine's address.
PLACES = {
    FOLDER: ("trainer-folder", "engine-folder", "unix:/run/syncstack/engine-0"),
    PID: ("trainer-pid", "engine-tcp", "tcp://engine-tcp:7000"),
    NEITHER: ("trainer-neither", "engine-tcp", "tcp://engine-tcp:7000"),
}

# What a pair takes that has no way for descriptors.
OTHERWISE = "stream"
BY_SCM, BY_PIDFD = "host_fd by scm", "host_fd by pidfd"
# What one side's doctor says of its host transport. It cannot know whose PID namespace it is in.
YES, IF_SHARED, NO = "yes", "in one PID namespace", "no"
MAY_FETCH = ("permissive", "unconfined")
# Why there is no way for descriptors.
CAUSE = {
    PID: "By pidfd_getfd: the engine may not call pidfd_getfd (",
    NEITHER: "By pidfd_getfd: the engine cannot name the trainer's process: they are in different PID namespaces",
}


def wanted(profile: str, layout: str) -> tuple[str, str]:
    """What one side's doctor must say, and what the pair's doctor, the plan and the refit must come to."""
    if layout == FOLDER:
        return YES, BY_SCM
    alone = IF_SHARED if profile in MAY_FETCH else NO
    return alone, BY_PIDFD if (alone, layout) == (IF_SHARED, PID) else OTHERWISE


class Cells:
    """The containers of one profile."""

    def __init__(self, profile: str, project: str) -> None:
        self.profile = profile
        self.project = project

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        """``docker compose`` on agreement.yaml."""
        security = {"docker-default": "no-new-privileges", "unconfined": "seccomp=unconfined"}
        option = security.get(self.profile, f"seccomp={ROOT}/seccomp/{self.profile}.json")
        command = ("docker", "compose", "--progress", "quiet", "--file", str(FILE), "--project-name", self.project)
        return check(*command, *arguments, timeout_s=timeout_s, SECURITY=option)

    def name(self, service: str) -> str:
        """A container's name."""
        return f"{self.project}-{service}-1"

    def inside(self, service: str, *command: str, codes: tuple[int, ...] = (0,)) -> Any:
        """The JSON that a command prints in a service's container."""
        result = run("docker", "exec", self.name(service), *command, timeout_s=90)
        assert result.returncode in codes, result.stdout
        return json.loads(result.stdout[result.stdout.index("{") :])


@pytest.fixture(scope="module")
def prepared() -> Iterator[str]:
    """A project whose volume has the models; what is left of it goes at the end."""
    project = f"syncstack-agree-{os.getpid()}"
    cells = Cells("docker-default", project)
    try:
        cells.compose("run", "--rm", "prepare")
        yield project
    finally:
        cells.compose("down", "--volumes", "--remove-orphans", "--timeout", "1")


@pytest.fixture(scope="module", params=STARTED)
def cells(request: pytest.FixtureRequest, prepared: str) -> Iterator[Cells]:
    """The containers of one profile; both engines serve."""
    cells = Cells(request.param, prepared)
    try:
        cells.compose("up", "--detach", "--wait", "--no-build")
        yield cells
    finally:
        print(cells.compose("logs", "--no-color"))  # shown with a failure only
        cells.compose("down", "--timeout", "1")


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, ...]]]:
    """Where the cells put what they saw; the table is printed at the end, whatever failed."""
    seen: list[tuple[str, ...]] = []
    yield seen
    table = Table("profile", "layout", "doctor alone", "doctor --peer", "plan", "used")
    for row in seen:
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=130).print(table)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + text.getvalue())


def alone(report: dict[str, Any]) -> str:
    """What the doctor of one side says of the host transport."""
    summary: str = report["summary"]
    if summary.startswith("no zero-copy host transport"):
        return NO
    assert summary.startswith("zero-copy host transport available"), summary
    return IF_SHARED if "to an engine in the same PID namespace" in summary else YES


def with_peer(report: dict[str, Any]) -> str:
    """The verdict of ``doctor --peer`` on the link."""
    (peer,) = report["peers"]
    (outcome,) = [one for one in peer["checks"] if one["id"] == "peer.transport"]
    chosen = peer["choice"].removeprefix("engine-0 worker 0: ").partition(" (not ")[0]
    assert outcome["status"] == "pass", outcome
    transport, _, way = outcome["observed"].rstrip(")").partition(" (")
    assert chosen == transport + (" by pidfd_getfd" if way == "pidfd" else "")
    return f"{transport} by {way}" if way else transport


def planned(cells: Cells, trainer: str, engine: str, folder: Path) -> dict[str, Any]:
    """What ``syncstack plan`` says of the hellos that ``syncstack facts`` wrote in both containers."""
    for side, service in (("trainer", trainer), ("engine", engine)):
        hello = cells.inside(service, "syncstack", "facts", "-o", "json", "--role", side)
        (folder / f"{side}.json").write_text(json.dumps(hello))
    ends = ("--from", str(folder / "trainer.json"), "--to", str(folder / "engine.json"))
    result = run(sys.executable, "-m", "syncstack.cli", "plan", *ends, "-o", "json")
    assert result.returncode == 0, result.stdout
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def chosen(document: dict[str, Any]) -> str:
    choice = document["choice"]
    return f"{choice['transport']} by {choice['fd']}" if choice["fd"] else choice["transport"]


@pytest.fixture(scope="module")
def version() -> str:
    """The Docker engine's release: it decides what docker-default is."""
    return check("docker", "version", "--format", "{{.Server.Version}}").strip()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_doctor_plan_and_refit_agree(
    cells: Cells, rows: list[tuple[str, ...]], version: str, layout: str, tmp_path: Path
) -> None:
    trainer, engine, address = PLACES[layout]
    with ThreadPoolExecutor(1) as pool:
        refit = pool.submit(cells.inside, trainer, *INSIDE, "refit", address, f"http://{engine}:8000", "/models")
        sides = [cells.inside(side, "syncstack", "doctor", "-o", "json", codes=(0, 1)) for side in (trainer, engine)]
        pair = cells.inside(trainer, "syncstack", "doctor", "--peer", address, "-o", "json", codes=(0, 1))
        document = planned(cells, trainer, engine, tmp_path)
        done = refit.result()
    used = " by ".join([done["transport"], *done["ways"]])
    row = (" / ".join(sorted({alone(report) for report in sides})), with_peer(pair), chosen(document), used)
    rows.append((cells.profile, layout, *row))
    assert_layout(cells.profile, layout, version, sides, pair)
    one_sided, together = wanted(cells.profile, layout)
    assert row == (one_sided, together, together, together), done
    reasons = assert_moved(cells, trainer, done)
    if not together.startswith("host_fd"):
        (lack,) = [each["unmet"][0]["reason"] for each in document["transports"] if each["transport"] == "host_fd"]
        assert CAUSE[layout] in reasons
        assert CAUSE[layout] in lack


def assert_layout(
    profile: str, layout: str, version: str, sides: Sequence[dict[str, Any]], pair: dict[str, Any]
) -> None:
    """The containers are what the cell says that they are."""
    shared = pair["peers"][0]["shared"]
    assert (shared["folder"], shared["pid"]) == (layout == FOLDER, layout == PID)
    assert (shared["host"], shared["user"], shared["ipc"], shared["net"]) == (True, True, False, False)
    for side in sides:
        answers = {name: fact["verdict"] for name, fact in side["facts"]["syscalls"].items()}
        assert answers == dict(expected(profile, engine=version))


def assert_moved(cells: Cells, trainer: str, done: dict[str, Any]) -> str:
    """The engine serves the trainer's weights under the next version. Returns why no better transport was used."""
    assert done["proven"]
    assert done["state_after"] == "serving"
    answers = cells.inside(trainer, "cat", "/models/answers.json")
    version = done["before"]["version"] + 1
    assert done["after"] == {"version": version, "logprobs": pytest.approx(answers["new"], abs=1e-5)}
    return "; ".join(done["why_not"].values())
