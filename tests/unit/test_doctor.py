"""The doctor's checks over facts of our making, and the texts that they give."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from rich.console import Console

from syncstack.doctor import remedies, render
from syncstack.doctor.checks import CHECKS
from syncstack.doctor.examine import diagnose, examine, exit_code, select, summary
from syncstack.doctor.model import Check, Finding, Remedy
from syncstack.doctor.pair import PAIR_CHECKS
from syncstack.doctor.ways import host_transport
from syncstack.errors import UsageError
from syncstack.facts import AllocatorFact, Cause, Facts, Guess, SyscallFact
from syncstack.facts.visibility import parse
from tests.unit.doctor_facts import (
    IDENTITY,
    MADE,
    MEMORY,
    NETWORK,
    NO_CAPABILITIES,
    SHARED,
    child,
    container,
    device,
    gpus,
    one,
    statuses,
    syscall,
    troubles,
)

OPEN = re.compile(r"unconfined|privileged\b(?!:)|ipc: host|pid: host|host(IPC|PID|Network)|SYS_PTRACE|cap_add", re.I)
NO_FOLDER = replace(SHARED, writable=False)


@pytest.mark.parametrize("profile", ["restrictive", "permissive"])
def test_our_containers_get_one_line_and_no_warning(profile: str) -> None:
    report = diagnose(container(profile))
    console = Console(file=StringIO(), width=40)
    render.text(console, report)
    assert console.file.getvalue() == "zero-copy host transport available; GPU: none\n"  # type: ignore[attr-defined]
    assert exit_code(report.checks) == 0


EXPANDABLE = AllocatorFact(expandable_segments=True, evidence="PYTORCH_ALLOC_CONF=expandable_segments:True")


def broken() -> list[tuple[str, str, dict[str, Any]]]:
    """Return (check, status, what is changed in our containers): one cause each."""
    facts = container()
    full = replace(MEMORY, shm_free_bytes=1 << 20)
    unreserved = SyscallFact(name="fallocate", number=0, verdict="denied", evidence=MADE)
    one_gpu = replace(MEMORY, memlock_soft_bytes=None)
    return [
        ("seccomp.filter", "warn", {"seccomp_mode": 0}),
        ("seccomp.threads", "fail", {"syscalls": syscall(facts, "clone3", "denied")}),
        ("ptrace.dumpable", "warn", {"identity": replace(IDENTITY, dumpable=False)}),
        ("kernel.sandbox", "warn", {"runtime": Guess(value="gvisor", evidence="/proc/version names gVisor")}),
        ("memory.memfd", "fail", {"syscalls": syscall(facts, "memfd_create", "denied")}),
        ("memory.memfd", "fail", {"syscalls": syscall(facts, "memfd_create", "absent")}),
        ("memory.memfd", "fail", {"memory": replace(MEMORY, memfd_reserve=unreserved)}),
        ("memory.budget", "warn", {"memory": replace(MEMORY, available_bytes=100 << 20)}),
        ("memory.budget", "warn", {"memory": replace(MEMORY, cgroup_headroom_bytes=100 << 20)}),
        ("memory.shm", "warn", {"memory": replace(MEMORY, shm_bytes=1 << 20, shm_free_bytes=1 << 20)}),
        ("memory.shm", "warn", {"memory": full}),
        ("socket.shared", "warn", {"socket_dir": replace(SHARED, mounted=False), "child": child("ok", "none")}),
        ("limits.nofile", "warn", {"memory": replace(MEMORY, nofile_soft=256)}),
        ("limits.nofile", "warn", {"memory": replace(MEMORY, nofile_soft=256, nofile_hard=256)}),
        ("limits.memlock", "warn", {"gpu": gpus(device())}),
        ("privileges.user", "warn", {"uid": 0}),
        ("privileges.user-namespace", "warn", {"identity": replace(IDENTITY, uid_map="0 100000 1000")}),
        ("privileges.no-new-privs", "warn", {"no_new_privs": False}),
        ("privileges.capabilities", "warn", {"capabilities": replace(NO_CAPABILITIES, bounding=("CAP_CHOWN",))}),
        ("privileges.capabilities", "warn", {"capabilities": replace(NO_CAPABILITIES, effective=("CAP_CHOWN",))}),
        ("gpu.masks", "warn", {"gpu": gpus(masks=(parse("CUDA_VISIBLE_DEVICES", "0,,1"),))}),
        ("gpu.masks", "warn", {"gpu": gpus(masks=(parse("CUDA_VISIBLE_DEVICES", "zero"),))}),
        ("gpu.compute-mode", "warn", {"memory": one_gpu, "gpu": gpus(device(compute_mode="exclusive-process"))}),
        ("gpu.handles", "warn", {"memory": one_gpu, "gpu": gpus(device(vmm=False, posix_fd=False))}),
        ("gpu.allocator", "warn", {"memory": one_gpu, "gpu": gpus(device(), allocator=EXPANDABLE)}),
    ]


def broken_without_folder() -> list[tuple[str, str, dict[str, Any]]]:
    """Return the same for what only counts where no socket can be had, each beside that."""
    yama = replace(IDENTITY, yama_scope=1, yama_evidence="ptrace_scope is 1")
    crowded = replace(NETWORK, ephemeral_low=1024, ephemeral_high=65535)
    loopback = replace(NETWORK, interfaces=NETWORK.interfaces[:1])
    return [
        ("socket.dir", "fail", {}),
        ("seccomp.pidfd-getfd", "warn", {}),
        ("ptrace.yama", "warn", {"identity": yama, "child": child("ok", "none")}),
        ("ptrace.lsm", "warn", {"child": child("denied", "lsm")}),
        ("network.interface", "warn", {"network": loopback}),
        ("network.ports", "warn", {"network": crowded}),
    ]


@pytest.mark.parametrize(("check", "status", "changes"), broken())
def test_each_cause_is_found_alone(check: str, status: str, changes: dict[str, Any]) -> None:
    facts = container(**changes)
    assert troubles(facts) == {check: status}
    assert exit_code(examine(facts, CHECKS)) == (status == "fail")


@pytest.mark.parametrize(("check", "status", "changes"), broken_without_folder())
def test_each_cause_is_found_beside_a_missing_folder(check: str, status: str, changes: dict[str, Any]) -> None:
    assert troubles(container(socket_dir=NO_FOLDER, **changes))[check] == status
    # With the folder, descriptors go over the socket, and none of this matters.
    assert troubles(container(**changes)) == {}


def all_broken() -> list[Facts]:
    found = [container(**changes) for _, _, changes in broken()]
    found += [container(socket_dir=NO_FOLDER, **changes) for _, _, changes in broken_without_folder()]
    for cause in get_args(Cause):
        found.append(container(socket_dir=NO_FOLDER, child=child("denied", cause)))
    return found


def test_every_trouble_says_what_follows_and_what_to_change() -> None:
    for facts in all_broken():
        for outcome in examine(facts, CHECKS):
            if outcome.status not in ("warn", "fail"):
                continue
            assert outcome.observed, outcome
            assert outcome.consequence, outcome
            assert outcome.hint == f"docs/doctor.md#{outcome.id}"
            remedy = outcome.remedy
            # Where neither file can say it, the text says who can.
            assert remedy.other or (remedy.compose and remedy.kubernetes), outcome


def test_no_advice_to_open_the_container() -> None:
    seen = 0
    for facts in all_broken():
        for outcome in examine(facts, CHECKS):
            remedy = outcome.remedy
            assert not OPEN.search(remedy.compose + remedy.kubernetes), outcome
            # Yama's second scope can only be explained with the capability's name, and says not to add it.
            assert not OPEN.search(remedy.other.replace("CAP_SYS_PTRACE may read another; do not add it", "")), outcome
            seen += bool(remedy)
    assert seen > 50


def test_every_check_has_a_cause_that_breaks_it() -> None:
    notes = {"memory.numa", "memory.huge-pages", "gpu.mig"}
    gpu_devices = {"gpu.devices"}  # test_f10
    found = {check for check, _, _ in (*broken(), *broken_without_folder())}
    assert {check.id for check in CHECKS} == found | notes | gpu_devices


def test_outside_of_a_container_its_checks_are_skipped() -> None:
    facts = container(
        uid=0, seccomp_mode=0, no_new_privs=False, runtime=Guess(value="none", evidence=""),
        socket_dir=replace(SHARED, mounted=False),
    )  # fmt: skip
    reasons = {outcome.id: outcome.observed for outcome in examine(facts, CHECKS) if outcome.status == "skip"}
    outside = {name for name, reason in reasons.items() if reason == "not in a container"}
    assert outside == {
        "seccomp.filter", "socket.shared", "privileges.user", "privileges.no-new-privs", "privileges.capabilities",
    }  # fmt: skip
    assert {reason for name, reason in reasons.items() if name not in outside} == {"no GPU here"}
    assert host_transport(facts) == (True, "")


def test_facts_of_an_older_release_skip_with_a_reason() -> None:
    facts = container(identity=None, child=None, network=type(NETWORK)())
    found = examine(facts, CHECKS)
    assert troubles(facts) == {}
    reasons = {outcome.id: outcome.observed for outcome in found if outcome.status == "skip"}
    assert reasons["ptrace.dumpable"] == "these facts do not say who the process is"
    assert reasons["network.interface"] == "these facts say nothing of the network"


def line(**changes: Any) -> str:
    facts = container(**changes)
    return summary(facts, examine(facts, CHECKS))


def test_the_summary_says_how_and_what_is_missing() -> None:
    assert line() == "zero-copy host transport available; GPU: none"
    assert line(socket_dir=replace(SHARED, mounted=False)) == (
        "no zero-copy host transport (/run/syncstack is not shared with any other container; "
        "no pidfd_getfd: seccomp); GPU: none; 2 warnings"
    )
    assert line(socket_dir=NO_FOLDER).startswith(
        "no zero-copy host transport (no unix socket can be made in /run/syncstack; no pidfd_getfd: seccomp); "
    )
    assert line(socket_dir=None, child=child("ok", "none")) == (
        "zero-copy host transport available (by pidfd_getfd only, to an engine in the same PID namespace: "
        "no socket folder); GPU: none"
    )
    assert line(syscalls=syscall(container(), "memfd_create", "denied")).endswith("GPU: none; 1 failure")


def test_a_check_that_crashes_hides_nothing() -> None:
    def crash(facts: Facts) -> Finding:
        raise ZeroDivisionError("a bug")

    bad: Check[Facts] = Check(id="test.crash", assertion="this works", severity="warn", find=crash)
    facts = container()
    outcomes = examine(facts, (bad, *CHECKS))
    assert outcomes[0].status == "crashed"
    assert "ZeroDivisionError: a bug" in outcomes[0].observed
    assert outcomes[1:] == examine(facts, CHECKS)
    assert exit_code(outcomes) == 1
    assert summary(facts, outcomes).endswith("1 crashed check")


def test_unknown_ids_are_refused() -> None:
    with pytest.raises(UsageError, match="nope"):
        select(["memory.memfd", "nope"], peer=True)
    assert [check.id for check in select(["memory.memfd"], peer=True)[0]] == ["memory.memfd"]


def test_the_page_has_a_section_for_each_check_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    ids = [check.id for check in (*CHECKS, *PAIR_CHECKS)]
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ids
    assert re.findall(r'^<a id="(.+)"></a>$', page, re.MULTILINE) == ids
    assert "zero-copy host transport available; GPU: none\n" in page


@pytest.mark.parametrize("cause", [cause for cause in get_args(Cause) if cause != "none"])
def test_every_cause_has_its_words_and_the_least_that_helps(cause: Cause) -> None:
    assert remedies.CAUSES[cause]
    assert remedies.pidfd(cause, container()) != Remedy()


def test_what_is_not_needed_is_a_note_with_its_remedy() -> None:
    outcome = one(container(), "seccomp.pidfd-getfd")
    assert outcome.status == "pass"
    assert outcome.observed.startswith("denied: ")
    assert "not needed: descriptors travel over the socket" in outcome.observed
    assert outcome.remedy.compose == 'security_opt: ["seccomp=./seccomp/permissive.json"]'
    console = Console(file=StringIO(), width=40)
    render.text(console, diagnose(container()), verbose=True)
    assert "if needed, compose: security_opt" in console.file.getvalue()  # type: ignore[attr-defined]


def test_notes_pass_whatever_they_note() -> None:
    numa = replace(MEMORY, numa_nodes=(0, 1), numa_allowed=(0,), huge_page_bytes=2 << 20, huge_pages_free=7)
    facts = container(memory=replace(numa, memlock_soft_bytes=None), gpu=gpus(device(mig=("MIG-1", "MIG-2"))))
    assert troubles(facts) == {}
    assert one(facts, "memory.numa").observed.startswith(
        "nodes: 2, allowed: 1; get_mempolicy, set_mempolicy, mbind: den"
    )
    assert (
        one(facts, "memory.huge-pages").observed == "reserved: 7 free of 2 MiB; transparent: madvise; for memfds: never"
    )
    assert "GPU 0: MIG-1, MIG-2" in one(facts, "gpu.mig").observed
    assert statuses(facts)["limits.memlock"] == "pass"
