"""The doctor's checks over facts of our making, its texts, and the command itself."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from syncstack.doctor import render
from syncstack.doctor.checks import CHECKS
from syncstack.doctor.examine import examine, exit_code, host_transport, select, summary
from syncstack.doctor.model import Check, Finding
from syncstack.errors import UsageError
from syncstack.facts import Capabilities, Facts, FolderFact, GpuFacts, Guess, SyscallFact, collect
from syncstack.seccomp.expected import expected

DOCTOR = (sys.executable, "-m", "syncstack.cli", "doctor")
NO_CAPABILITIES = Capabilities(effective=(), permitted=(), inheritable=(), bounding=(), ambient=())
SHARED = FolderFact(path="/run/syncstack", exists=True, writable=True, mounted=True, evidence="made for a test")


def container(profile: str = "restrictive", **changes: Any) -> Facts:
    """Return the facts of our own containers, with ``changes``."""
    real = collect()
    made = replace(
        real,
        uid=10001,
        seccomp_mode=2,
        seccomp_filters=1,
        no_new_privs=True,
        capabilities=NO_CAPABILITIES,
        runtime=Guess(value="docker", evidence="made for a test"),
        memory=replace(real.memory, shm_bytes=64 << 20, nofile_soft=1024, memlock_soft_bytes=64 << 10),
        gpu=GpuFacts(count=0, evidence="made for a test"),
        socket_dir=SHARED,
        syscalls={
            name: SyscallFact(name=name, number=0, verdict=word, evidence="made for a test")  # type: ignore[arg-type]
            for name, word in expected(profile).items()
        },
    )
    return replace(made, **changes)


def syscall(facts: Facts, name: str, verdict: str) -> dict[str, SyscallFact]:
    return {**facts.syscalls, name: replace(facts.syscalls[name], verdict=verdict)}


def statuses(facts: Facts) -> dict[str, str]:
    return {outcome.id: outcome.status for outcome in examine(facts)}


@pytest.mark.parametrize("profile", ["restrictive", "permissive"])
def test_our_containers_get_one_line_and_no_warning(profile: str) -> None:
    facts = container(profile)
    outcomes = examine(facts)
    console = Console(file=StringIO(), width=40)
    render.text(console, outcomes, summary(facts, outcomes), verbose=False)
    assert console.file.getvalue() == "zero-copy host transport available; GPU: none\n"  # type: ignore[attr-defined]
    assert exit_code(outcomes) == 0


@pytest.mark.parametrize("verdict", ["ok", "denied", "absent"])
def test_pidfd_getfd_is_a_note_and_never_a_warning(verdict: str) -> None:
    facts = container(syscalls=syscall(container(), "pidfd_getfd", verdict))
    (outcome,) = examine(facts, select(["seccomp.pidfd-getfd"]))
    assert outcome.status == "pass"
    assert outcome.observed.startswith(f"{verdict}: ")
    assert "not needed" in outcome.observed


def broken() -> list[tuple[str, str, dict[str, Any]]]:
    facts = container()
    memory = facts.memory
    return [
        ("seccomp.filter", "warn", {"seccomp_mode": 0}),
        ("seccomp.threads", "fail", {"syscalls": syscall(facts, "clone3", "denied")}),
        ("memory.memfd", "fail", {"syscalls": syscall(facts, "memfd_create", "denied")}),
        ("memory.memfd", "fail", {"syscalls": syscall(facts, "memfd_create", "absent")}),
        ("socket.dir", "fail", {"socket_dir": replace(SHARED, writable=False)}),
        ("socket.shared", "warn", {"socket_dir": replace(SHARED, mounted=False)}),
        ("memory.shm", "warn", {"memory": replace(memory, shm_bytes=1 << 20)}),
        ("limits.nofile", "warn", {"memory": replace(memory, nofile_soft=256)}),
        ("limits.memlock", "warn", {"gpu": GpuFacts(count=1, evidence="made for a test")}),
        ("privileges.user", "warn", {"uid": 0}),
        ("privileges.no-new-privs", "warn", {"no_new_privs": False}),
        ("privileges.capabilities", "warn", {"capabilities": replace(NO_CAPABILITIES, bounding=("CAP_CHOWN",))}),
        ("privileges.capabilities", "warn", {"capabilities": replace(NO_CAPABILITIES, effective=("CAP_CHOWN",))}),
    ]


@pytest.mark.parametrize(("check", "status", "changes"), broken())
def test_each_cause_is_found_alone(check: str, status: str, changes: dict[str, Any]) -> None:
    facts = container(**changes)
    outcomes = examine(facts)
    assert {outcome.id: outcome.status for outcome in outcomes if outcome.status in ("warn", "fail")} == {check: status}
    found = next(outcome for outcome in outcomes if outcome.id == check)
    assert found.observed
    assert found.consequence
    assert found.remedy
    assert exit_code(outcomes) == (status == "fail")


def test_no_advice_to_open_the_container() -> None:
    for _, _, changes in broken():
        for outcome in examine(container(**changes)):
            assert not re.search(r"unconfined|privileged\b(?!:)|ipc: host|SYS_PTRACE", outcome.remedy)


def test_every_check_has_a_cause_that_breaks_it() -> None:
    always_pass = {"seccomp.pidfd-getfd", "gpu.devices"}
    assert {check.id for check in CHECKS} == {check for check, _, _ in broken()} | always_pass


def test_outside_of_a_container_its_checks_are_skipped() -> None:
    facts = container(
        uid=0, seccomp_mode=0, no_new_privs=False, runtime=Guess(value="none", evidence=""),
        socket_dir=replace(SHARED, mounted=False),
    )  # fmt: skip
    found = statuses(facts)
    assert {name for name, status in found.items() if status == "skip"} == {
        "seccomp.filter", "socket.shared", "privileges.user", "privileges.no-new-privs", "privileges.capabilities",
        "limits.memlock",
    }  # fmt: skip
    assert host_transport(facts) == (True, "")


def test_the_summary_names_what_is_missing() -> None:
    facts = container(socket_dir=replace(SHARED, mounted=False))
    assert summary(facts, examine(facts)) == (
        "no zero-copy host transport (/run/syncstack is not shared with any other container); GPU: none; 1 warning"
    )
    facts = container(syscalls=syscall(container(), "memfd_create", "denied"))
    assert summary(facts, examine(facts)).endswith("GPU: none; 1 failure")
    assert host_transport(container(socket_dir=None)) == (False, "no socket folder")


def test_a_check_that_crashes_hides_nothing() -> None:
    def crash(facts: Facts) -> Finding:
        raise ZeroDivisionError("a bug")

    bad = Check(id="test.crash", assertion="this works", severity="warn", find=crash)
    facts = container()
    outcomes = examine(facts, (bad, *CHECKS))
    assert outcomes[0].status == "crashed"
    assert "ZeroDivisionError: a bug" in outcomes[0].observed
    assert outcomes[1:] == examine(facts)
    assert exit_code(outcomes) == 1
    assert summary(facts, outcomes).endswith("1 crashed check")


def test_unknown_ids_are_refused() -> None:
    with pytest.raises(UsageError, match="nope"):
        select(["memory.memfd", "nope"])
    assert [check.id for check in select(["memory.memfd"])] == ["memory.memfd"]


def test_the_page_has_a_section_for_each_check_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    ids = [check.id for check in CHECKS]
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ids
    assert re.findall(r'^<a id="(.+)"></a>$', page, re.MULTILINE) == ids
    assert "zero-copy host transport available; GPU: none\n" in page


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DOCTOR, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_command_as_json(tmp_path: Path) -> None:
    done = run("-o", "json", "--socket-dir", str(tmp_path))
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert [check["id"] for check in found["checks"]] == [check.id for check in CHECKS]
    assert found["facts"]["socket_dir"]["path"] == str(tmp_path)
    assert found["summary"]


def test_the_command_takes_the_folder_from_the_environment(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    done = run("--only", "socket.dir", SYNCSTACK_SOCKET_DIR=absent)
    assert done.returncode == 1
    assert f"{absent} does not exist" in done.stdout
    assert "see: docs/doctor.md#socket.dir" in done.stdout
    assert run("--only", "socket.dir", "--socket-dir", str(tmp_path), SYNCSTACK_SOCKET_DIR=absent).returncode == 0


def test_wrong_use_exits_2() -> None:
    unknown = run("--only", "nope")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "syncstack doctor --list" in unknown.stderr
    assert run("-o", "xml").returncode == 2


def test_the_list() -> None:
    done = run("--list")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [check.id for check in CHECKS]


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_on_a_terminal_only_and_not_against_no_color(
    tmp_path: Path, environment: dict[str, str], coloured: bool
) -> None:
    leader, follower = pty.openpty()
    base = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    try:
        subprocess.run(
            [*DOCTOR, "--only", "socket.dir", "-v", "--socket-dir", str(tmp_path)],
            stdout=follower,
            timeout=60,
            check=True,
            env={**base, "TERM": "xterm-256color", **environment},
        )
        shown = os.read(leader, 65536).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert "socket.dir" in shown
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)) is coloured
    assert "\x1b" not in run("--only", "socket.dir", "-v", "--socket-dir", str(tmp_path)).stdout
