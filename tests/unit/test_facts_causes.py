"""The decision over what was observed, where the cause cannot be made here: Yama, AppArmor, SELinux, old kernels.

The answers in these fixtures are those of seccomp.md's table, taken on kernels that have the cause. Every cause that
this kernel can have is made real in tests/process/test_causes.py.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from syncstack.facts.causes import Credentials, Observed, decide
from syncstack.facts.identity import id_map, yama
from syncstack.facts.model import IdentityFacts, TargetFact

ALL = (1 << 41) - 1
PTRACE = 1 << 19
USER = Credentials(uids=(1000, 1000, 1000), gids=(1000, 1000, 1000))
ROOT = Credentials(uids=(0, 0, 0), gids=(0, 0, 0), permitted=ALL & ~PTRACE, effective=ALL & ~PTRACE)
TRACER = Credentials(uids=(0, 0, 0), gids=(0, 0, 0), permitted=ALL, effective=ALL)


def observed(**changes: Any) -> Observed:
    """Two siblings of one user, and EPERM from pidfd_getfd."""
    fields: dict[str, Any] = {
        "target": "peer",
        "kernel": "6.8.0-50-generic",
        "opened": "ok",
        "getfd": "EPERM",
        "kcmp_unreached": "ESRCH",
        "kcmp": "ok",
        "link": "ok",
        "mine": USER,
        "theirs": USER,
        "owner": 1000,
    }
    return Observed(**{**fields, **changes})


def refused(**changes: Any) -> Observed:
    """The same, but it may not even be looked into."""
    return observed(**{"kcmp": "EPERM", "link": "EACCES", **changes})


def check(seen: Observed, verdict: str, cause: str, *evidence: str) -> TargetFact:
    fact = decide(seen)
    assert (fact.verdict, fact.cause) == (verdict, cause), fact
    for text in evidence:
        assert text in fact.evidence, (text, fact)
    return fact


@pytest.mark.parametrize("scope", [1, 2, 3])
@pytest.mark.parametrize("who", [USER, ROOT])
def test_a31_each_scope_of_yama(scope: int, who: Credentials) -> None:
    """It may be read but not attached to; root without CAP_SYS_PTRACE is like anybody."""
    seen = observed(yama_present=True, yama_scope=scope, mine=who, theirs=who)
    check(seen, "denied", "yama", f"ptrace_scope is {scope}", "kcmp = ok")


def test_a31_scope_3_holds_for_cap_sys_ptrace_too() -> None:
    check(observed(yama_present=True, yama_scope=3, mine=TRACER, theirs=TRACER), "denied", "yama")


@pytest.mark.parametrize("scope", [1, 2])
def test_a31_cap_sys_ptrace_passes_the_lower_scopes(scope: int) -> None:
    """So Yama does not explain a refusal."""
    check(observed(yama_present=True, yama_scope=scope, mine=TRACER, theirs=TRACER), "denied", "lsm")


def test_a31_a_scope_that_cannot_be_read() -> None:
    check(observed(yama_present=True), "denied", "yama", "ptrace_scope is unreadable")


@pytest.mark.parametrize("present", [True, False])
def test_a31_scope_0_or_no_yama_is_no_cause(present: bool) -> None:
    seen = observed(yama_present=present, yama_scope=0 if present else None)
    check(seen, "denied", "lsm", "not because of Yama")


@pytest.mark.parametrize("text", ["0\n", "1\n", "2\n", "3\n"])
def test_a31_the_scope_is_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = yama(tmp_path)
    assert (found.present, found.scope) == (True, int(text))
    assert found.evidence == f"{path}: {text.strip()}"


def test_a31_an_absent_file_is_no_error(tmp_path: Path) -> None:
    found = yama(tmp_path)
    assert (found.present, found.scope) == (False, None)
    assert found.evidence.endswith("is absent: no Yama")


def test_a31_an_unreadable_file_is_no_absent_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads every file, so the refusal is a fixture."""

    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    found = yama(tmp_path)
    assert (found.present, found.scope) == (True, None)
    assert "Permission denied" in found.evidence


def test_yama_is_no_cause_where_nothing_may_be_read() -> None:
    """Its scope is 1 on every Ubuntu; what stands in the way here comes before it."""
    seen = refused(yama_present=True, yama_scope=1, theirs=Credentials(uids=(1001,) * 3, gids=(1000,) * 3))
    check(seen, "denied", "uid", "1001")


def test_apparmor_refuses_reading_too() -> None:
    """docker-default against an unconfined peer; same user, dumpable, no capability missing."""
    check(refused(label="docker-default (enforce)", their_label="unconfined"), "denied", "lsm", "dumpable")


def test_a_label_decides_for_root_where_nothing_else_can() -> None:
    """Root leaves no sign in /proc of not being dumpable."""
    seen = refused(mine=ROOT, theirs=ROOT, owner=0)
    check(seen, "denied", "non-dumpable", "no sign")
    labelled = refused(mine=ROOT, theirs=ROOT, owner=0, label="system_u:system_r:container_t:s0:c1,c2")
    check(labelled, "denied", "lsm", "container_t", "unknown there")
    check(refused(mine=ROOT, theirs=ROOT, owner=0, dumpable=True), "denied", "lsm")


def test_selinux_may_refuse_the_file_alone() -> None:
    check(observed(getfd="EACCES"), "denied", "lsm", "never EACCES")


@pytest.mark.parametrize(
    ("changes", "verdict", "cause"),
    [
        ({"unreached": "ENOSYS", "kernel": "5.4.0-200-generic"}, "absent", "old-kernel"),
        ({"unreached": "ENOSYS", "kernel": "5.6.0", "seccomp_mode": 2}, "absent", "seccomp"),
        ({"unreached": "ENOSYS", "kernel": "4.4.0", "sandbox": True}, "absent", "sandbox"),
        ({"unreached": "ENOSYS", "kernel": "6.8.0"}, "absent", "sandbox"),
        ({"unreached": "EPERM", "seccomp_mode": 2}, "denied", "seccomp"),
        ({"unreached": "EACCES", "seccomp_mode": 2}, "denied", "seccomp"),
        ({"unreached": "EPERM", "sandbox": True}, "denied", "sandbox"),
        ({"unreached": "EPERM"}, "denied", "unknown"),
        ({"opened": "ENOSYS", "kernel": "5.2.0"}, "absent", "old-kernel"),
        ({"opened": "ENOSYS", "kernel": "5.10.0", "seccomp_mode": 2}, "absent", "seccomp"),
        ({"opened": "ESRCH"}, "absent", "target-gone"),
        ({"opened": "EMFILE"}, "denied", "unknown"),
        ({"getfd": "ESRCH"}, "absent", "target-gone"),
        ({"getfd": "EBADF"}, "absent", "bad-descriptor"),
        ({"getfd": "EMFILE"}, "denied", "unknown"),
        ({"getfd": "ENOSYS", "seccomp_mode": 2}, "absent", "seccomp"),
        ({"kcmp": "", "link": ""}, "denied", "unknown"),
    ],
)
def test_each_answer_has_one_cause(changes: dict[str, Any], verdict: str, cause: str) -> None:
    check(observed(**changes), verdict, cause)


@pytest.mark.parametrize("kcmp", ["EPERM", "ENOSYS"])
def test_a_filter_before_kcmp_leaves_the_link_as_witness(kcmp: str) -> None:
    """Docker's default profile: kcmp is refused, the link is read."""
    seen = observed(kcmp=kcmp, kcmp_unreached=kcmp, seccomp_mode=2, yama_present=True, yama_scope=1)
    check(seen, "denied", "yama")
    check(refused(kcmp=kcmp, kcmp_unreached=kcmp, seccomp_mode=2, owner=0), "denied", "non-dumpable")


def test_kcmp_is_the_better_witness() -> None:
    """A setuid program reads the link with its effective user, and asks for a descriptor with its real one."""
    mine = Credentials(uids=(1001, 1000, 1000), gids=(1000, 1000, 1000))
    check(observed(mine=mine, kcmp="EPERM"), "denied", "uid", "uid 1001 here")
    check(observed(mine=mine, kcmp="EPERM", kcmp_unreached="EPERM", seccomp_mode=2), "denied", "uid", "uid 1001 here")


def test_ids_that_cannot_be_read_name_no_cause() -> None:
    check(refused(theirs=Credentials(), owner=None), "denied", "unknown")


def test_nothing_is_asked_of_a_number_that_is_not_proven() -> None:
    seen = observed(opened="", getfd="", kcmp="", link="", disproof="pid-namespace", proof="pid 7 counts elsewhere")
    fact = check(seen, "absent", "pid-namespace", "it was not opened", "pid 7 counts elsewhere")
    assert "pidfd_open" not in fact.evidence


IDENTITY = "         0          0 4294967295\n"
ROOTLESS = "         0       1000          1\n         1     100000      65536\n"


@pytest.mark.parametrize(
    ("text", "remapped"),
    [(IDENTITY, False), (ROOTLESS, True), ("         0     100000      65536\n", True), ("", False)],
)
def test_a36_identity_and_remapped_maps(text: str, remapped: bool) -> None:
    """A rootless engine, and one with userns-remap; "" is a kernel without user namespaces."""
    facts = IdentityFacts(uid=0, gid=0, euid=0, dumpable=True, uid_map=id_map(text), gid_map=id_map(text))
    assert facts.remapped is remapped
    assert "  " not in facts.uid_map
    assert len(facts.uid_map.splitlines()) == len(text.splitlines())
