"""What the doctor says about refused descriptors that users have reported; a test is named by its row in the bug log.

The cause is made for real where this kernel can. Yama and gVisor cannot be had here: those tests feed what the probes
write, through the probes' own readers where these take a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from syncstack.doctor.examine import diagnose
from syncstack.facts import Facts, Guess, TargetFact
from syncstack.facts.identity import yama
from tests.unit.doctor_facts import IDENTITY, child, container, one, troubles
from tests.unit.doctor_real import (
    CLI,
    NO_FOLDER,
    POWERLESS,
    ROOT,
    doctor,
    end,
    filtered,
    needs_no_filter,
    needs_powerless,
    needs_users,
    peer,
    sleeper,
)

NON_DUMPABLE = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"


@needs_powerless
@needs_no_filter
def test_a02_a_ptrace_rule_is_no_filter_and_no_capability_is_advised() -> None:
    """Two processes of one user without capabilities, the sender not dumpable: EPERM with no filter at all."""
    target = sleeper(NON_DUMPABLE, *POWERLESS)
    code = (
        "import msgspec; from tests.unit.doctor_real import peer\n"
        f"print(msgspec.json.encode(peer({target.pid}, 0)).decode())"
    )
    try:
        done = subprocess.run(
            [*POWERLESS, sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        found = TargetFact(**json.loads(done.stdout))
    finally:
        end(target)
    outcome = one(container("permissive", child=found, socket_dir=NO_FOLDER), "seccomp.pidfd-getfd")
    assert outcome.status == "warn"
    assert "EPERM" in outcome.observed
    assert "forbidden by the ptrace rule, not by a filter" in outcome.observed
    assert "CAP_" not in f"{outcome.remedy.other}{outcome.remedy.compose}{outcome.remedy.kubernetes}"
    assert "seccomp" not in outcome.remedy.compose


@needs_powerless
def test_a02_the_process_that_hides_is_told_so_itself() -> None:
    code = f"{NON_DUMPABLE}\nfrom syncstack.cli import app\napp(['doctor', '--only', 'ptrace.dumpable'])"
    done = subprocess.run(
        [*POWERLESS, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert "warning ptrace.dumpable" in done.stdout, done.stderr
    assert "prctl(PR_GET_DUMPABLE) is not 1" in done.stdout


@needs_no_filter
def test_a04_a_wrong_number_is_no_matter_of_permission() -> None:
    target = sleeper()
    try:
        found = peer(target.pid, 999)
    finally:
        end(target)
    assert found.cause == "bad-descriptor"
    outcome = one(container("permissive", child=found, socket_dir=NO_FOLDER), "seccomp.pidfd-getfd")
    assert "EBADF" in outcome.observed
    assert "no matter of permission" in outcome.observed
    assert not outcome.observed.startswith("denied")
    assert outcome.remedy.compose == outcome.remedy.kubernetes == ""


@pytest.mark.parametrize(("errno", "word"), [(1, "denied"), (38, "absent")])
def test_a30_forbidden_and_not_there_are_two_verdicts(tmp_path: Path, errno: int, word: str) -> None:
    prefix = filtered(tmp_path, "pidfd_getfd", errno=errno)
    check = doctor(*prefix, only=("seccomp.pidfd-getfd",), folder=tmp_path)["by_id"]["seccomp.pidfd-getfd"]
    assert check["observed"].startswith(f"{word}: ")
    # This kernel has the call, so the filter hides it; what cannot be had here is the sandbox itself.
    assert "forbidden by the seccomp filter" in check["observed"]


def test_a30_a_sandbox_is_named_and_a_copy_is_no_failure() -> None:
    facts = container(
        runtime=Guess(value="gvisor", evidence="/proc/version names gVisor"), child=child("absent", "sandbox", "ENOSYS")
    )
    assert troubles(facts) == {"kernel.sandbox": "warn"}
    assert "a sandbox whose kernel has no such call" in one(facts, "seccomp.pidfd-getfd").observed
    assert "copied" in one(facts, "kernel.sandbox").consequence


SCOPES = {
    0: ("pass", ""),
    1: ("warn", "trainer: prctl(PR_SET_PTRACER, process of the engine's worker); engine: nothing to change"),
    2: (
        "warn",
        "only a process with CAP_SYS_PTRACE may read another; do not add it: trainer and engine: share a folder",
    ),
    3: ("warn", "nobody may read another process until the node restarts: trainer and engine: share a folder"),
}


def yama_facts(root: Path) -> Facts:
    """Return facts without a folder, and with what the probe reads below ``root``. There is no Yama in this kernel."""
    found = yama(root)
    identity = replace(IDENTITY, yama_scope=found.scope, yama_evidence=found.evidence)
    return container("permissive", identity=identity, socket_dir=NO_FOLDER)


@pytest.mark.parametrize("scope", SCOPES)
def test_a31_each_scope_has_a_line_for_both_sides(tmp_path: Path, scope: int) -> None:
    path = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
    path.parent.mkdir(parents=True)
    path.write_text(f"{scope}\n")
    status, advice = SCOPES[scope]
    outcome = one(yama_facts(tmp_path), "ptrace.yama")
    assert outcome.status == status
    assert f"ptrace_scope: {scope}" in outcome.observed
    assert advice in outcome.remedy.other
    others = [text for other, (_, text) in SCOPES.items() if other != scope and text]
    assert not any(text in outcome.remedy.other for text in others)


def test_a31_a_file_that_is_absent_is_no_error(tmp_path: Path) -> None:
    outcome = one(yama_facts(tmp_path), "ptrace.yama")
    assert outcome.status == "pass"
    assert "absent" in outcome.observed


def test_a31_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").mkdir(parents=True)  # root reads any file, but no folder
    outcome = one(yama_facts(tmp_path), "ptrace.yama")
    assert outcome.status == "pass"
    assert "Is a directory" in outcome.observed


@needs_no_filter
def test_a33_that_ptrace_works_says_nothing(tmp_path: Path) -> None:
    found = doctor(*filtered(tmp_path, "pidfd_getfd", errno=1), folder=tmp_path)
    assert found["facts"]["syscalls"]["ptrace"]["verdict"] == "ok"
    assert found["by_id"]["seccomp.pidfd-getfd"]["observed"].startswith("denied: ")


def spoken(facts: Facts) -> str:
    """Return everything that a user is advised to do."""
    checks = diagnose(facts).checks
    return "\n".join(f"{one.remedy.other}\n{one.remedy.compose}\n{one.remedy.kubernetes}" for one in checks)


def test_a36_a_rootless_user_is_never_sent_to_host_namespaces() -> None:
    remapped = replace(IDENTITY, uid_map="0 1000 1\n1 100000 65536", gid_map="0 1000 1\n1 100000 65536")
    for cause in ("seccomp", "pid-namespace", "user-namespace", "uid"):
        facts = container(identity=remapped, socket_dir=NO_FOLDER, child=child("denied", cause))  # type: ignore[arg-type]
        assert "host" not in spoken(facts).lower().replace("localhost", "").replace("hostusers: false stays", "")
    namespace = one(container(identity=remapped), "privileges.user-namespace")
    assert namespace.status == "pass"
    assert "uid 10001 is 110000 outside" in namespace.observed
    # Root inside is nobody in particular outside: no reason to warn.
    assert one(container(identity=remapped, uid=0), "privileges.user").status == "pass"
    assert one(container(identity=IDENTITY, uid=0), "privileges.user").status == "warn"


@needs_users
def test_a36_a_real_user_namespace_is_seen(tmp_path: Path) -> None:
    check = doctor("unshare", "--map-root-user", only=("privileges.user-namespace",), folder=tmp_path)
    observed = check["by_id"]["privileges.user-namespace"]["observed"]
    assert observed.startswith(f"a rootless or remapped engine: uid 0 is {os.getuid()} outside (uid_map: 0 ")


@needs_powerless
def test_a37_without_any_capability_there_is_a_way_and_it_is_said(tmp_path: Path) -> None:
    found = doctor(*POWERLESS, *CLI, "seccomp", "run", "restrictive", "--", folder=tmp_path)
    assert found["facts"]["capabilities"]["bounding"] == []
    assert found["by_id"]["socket.dir"]["status"] == "pass"
    assert "forbidden by the seccomp filter" in found["by_id"]["seccomp.pidfd-getfd"]["observed"]
    assert "SYS_PTRACE" not in json.dumps([check["remedy"] for check in found["checks"]])
