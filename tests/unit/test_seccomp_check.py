"""Checking and comparing profiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from syncstack.seccomp import builtin
from syncstack.seccomp.check import Finding, Reading, check
from syncstack.seccomp.cli import app
from syncstack.seccomp.diff import compare
from syncstack.seccomp.generate import document
from syncstack.seccomp.table import PROFILES

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a profile: the restrictive one, flat, with fields replaced and calls removed; return its path."""

    def write(*, without: tuple[str, ...] = (), rules: tuple[dict[str, Any], ...] = (), **fields: Any) -> str:
        profile = document("restrictive") | fields
        for rule in profile["syscalls"]:
            rule["names"] = [name for name in rule["names"] if name not in without]
        profile["syscalls"] = [*rules, *(rule for rule in profile["syscalls"] if rule["names"])]
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({key: value for key, value in profile.items() if value is not None}))
        return str(path)

    return write


@pytest.fixture
def docker_format(tmp_path: Path) -> str:
    """A profile with conditions, as people take it out of Docker's sources."""
    path = tmp_path / "default.json"
    path.write_bytes(msgspec.json.encode(builtin.docker()))
    return str(path)


def readings(profile: str, *runtimes: Any, caps: tuple[str, ...] = ()) -> dict[str, Reading]:
    found = check(profile, caps=caps, runtimes=runtimes)
    assert found.ok == all(reading.ok for reading in found.readings)
    return {reading.runtime: reading for reading in found.readings}


def of_kind(reading: Reading, kind: str) -> list[Finding]:
    return [finding for finding in reading.findings if finding.kind == kind]


def calls(reading: Reading, kind: str) -> set[str]:
    return {call for finding in of_kind(reading, kind) for call in finding.calls}


@pytest.mark.parametrize("profile", PROFILES)
def test_our_profiles_are_fine_for_every_runtime(profile: str) -> None:
    found = readings(profile, "docker", "docker-20.10", "containerd")
    assert set(found) == {"docker", "docker-20.10", "containerd"}
    for reading in found.values():
        assert reading.ok
        assert {finding.level for finding in reading.findings} <= {"note"}


def test_a_docker_format_profile_opens_what_containerd_drops(docker_format: str) -> None:
    found = readings(docker_format)
    assert (found["docker"].ok, found["containerd"].ok) == (True, False)
    opened = calls(found["containerd"], "opened")
    assert {"mount", "unshare", "bpf", "perf_event_open", "init_module", "clone3", "clone(CLONE_NEWUSER)"} <= opened
    assert "io_uring_setup" not in opened
    (dropped,) = of_kind(found["containerd"], "dropped")
    assert "archMap" in dropped.text
    assert not of_kind(found["docker"], "dropped")


def test_docker_decides_the_conditions_for_the_capabilities(docker_format: str) -> None:
    assert calls(readings(docker_format, "docker")["docker"], "needed") >= {"pidfd_getfd", "kcmp"}
    reading = readings(docker_format, "docker", caps=("CAP_SYS_PTRACE",))["docker"]
    assert reading.ok
    assert "pidfd_getfd" not in calls(reading, "needed")
    admin = readings(docker_format, "docker", caps=("CAP_SYS_ADMIN",))["docker"]
    assert {"mount", "clone3"} <= calls(admin, "dangerous")
    assert not admin.ok


def test_built_in_profiles_are_read_by_their_own_engine() -> None:
    assert list(readings("docker")) == ["docker"]
    assert list(readings("containerd")) == ["containerd"]
    assert readings("containerd")["containerd"].ok
    old = readings("docker@20.10.24")["docker"]
    assert calls(old, "dangerous") == {
        "io_uring_enter", "io_uring_register", "io_uring_setup", "socket(AF_ALG)", "socket(AF_VSOCK)",
    }  # fmt: skip


@pytest.mark.parametrize("call", ["memfd_create", "sendmsg", "recvmsg", "fallocate", "capset", "sched_getaffinity"])
def test_a_needed_call_that_is_missing_fails_with_its_reason(write: Write, call: str) -> None:
    for reading in readings(write(without=(call,))).values():
        assert not reading.ok
        (finding,) = [finding for finding in of_kind(reading, "needed") if call in finding.calls]
        assert finding.level == "fail"
        assert "Needed by" in finding.text
        assert "Without: " in finding.text


def test_clone3_may_be_absent_but_not_forbidden(write: Write) -> None:
    rule = {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}
    (reading,) = readings(write(without=("clone3",), rules=(rule,)), "docker").values()
    assert calls(reading, "needed") >= {"clone3"}
    assert not reading.ok
    assert any("no thread can be started" in finding.text for finding in reading.findings)


def test_docker_20_10_drops_the_default_errno(write: Write) -> None:
    profile = write(without=("clone3",))
    found = readings(profile, "docker", "docker-20.10")
    (warning,) = of_kind(found["docker"], "default-errno")
    assert (warning.level, warning.calls) == ("warn", ("clone3",))
    assert (found["docker"].ok, found["docker-20.10"].ok) == (True, False)
    assert "clone3" in calls(found["docker-20.10"], "needed")


def test_unknown_names_are_told_apart(write: Write) -> None:
    rule = {"names": ["memfd_crate", "call_of_the_future"], "action": "SCMP_ACT_ALLOW"}
    (reading,) = readings(write(without=("memfd_create",), rules=(rule,)), "docker").values()
    found = {finding.calls[0]: finding for finding in of_kind(reading, "unknown-name")}
    assert "misspelt for memfd_create?" in found["memfd_crate"].text
    assert (found["memfd_crate"].level, found["call_of_the_future"].level) == ("warn", "note")


def test_a_misspelt_refusal_is_open(tmp_path: Path) -> None:
    path = tmp_path / "deny.json"
    rule = {"names": ["unsare"], "action": "SCMP_ACT_ERRNO"}
    path.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}))
    reading = readings(str(path), "docker")["docker"]
    assert calls(reading, "not-denied") == {"unsare"}
    assert {"mount", "unshare", "io_uring_setup", "socket(AF_ALG)"} <= calls(reading, "dangerous")
    assert not reading.ok


def test_the_form_of_the_file(write: Write) -> None:
    rules = (
        {"names": ["read"], "action": "SCMP_ACT_ALLOW", "include": {"caps": ["CAP_BPF"]}},
        {"names": ["vhangup"], "action": "SCMP_ACT_ERRNO", "errno": "ENOSYS"},
    )
    reading = readings(write(rules=rules, architectures=None, flags=["SECCOMP_FILTER_FLAG_LOG"]), "docker")["docker"]
    kinds = {finding.kind: finding for finding in reading.findings if finding.level != "fail"}
    assert "syscalls[0].include" in kinds["unknown-field"].text
    assert {"no-architectures", "flags", "errno-name"} <= set(kinds)
    assert reading.ok, "none of this denies or opens anything that counts"


def test_the_old_form_is_not_read_by_containerd(write: Write) -> None:
    rules = ({"name": "memfd_create", "action": "SCMP_ACT_ALLOW"},)
    found = readings(write(without=("memfd_create",), rules=rules))
    assert (found["docker"].ok, found["containerd"].ok) == (True, False)
    assert calls(found["containerd"], "old-form") == {"memfd_create"}


def test_profiles_differ_in_the_named_calls_only() -> None:
    found = compare("permissive", "restrictive", caps=())
    names = """
        pidfd_getfd kcmp get_mempolicy set_mempolicy set_mempolicy_home_node mbind pidfd_open pidfd_send_signal
        process_mrelease ptrace process_vm_readv process_vm_writev"""
    expected = {(name, "allow", "EPERM") for name in names.split()}
    assert {(row.call, row.first, row.second) for row in found.differences} == expected


def test_profiles_written_differently_that_answer_alike_are_the_same(write: Write) -> None:
    profile = write()
    document = json.loads(Path(profile).read_text())
    # One rule a name, the other way round, and the families allowed by another operator.
    rules = [{**rule, "names": [name]} for rule in document["syscalls"] for name in reversed(rule["names"])]
    other = Path(profile).with_name("other.json")
    other.write_text(json.dumps(document | {"syscalls": rules[::-1]}))
    found = compare(profile, str(other), caps=())
    assert found.differences == ()
    assert found.same > 350


def test_differences_by_argument_name_the_arguments() -> None:
    found = {
        (row.call, row.args): (row.first, row.second) for row in compare("docker@29.0.0", "docker", caps=()).differences
    }
    assert found == {("socket", "12, 19-20, 23, 25, 34, 37-38, 46"): ("allow", "EPERM")}


def test_capabilities_and_unknown_numbers_are_compared(tmp_path: Path) -> None:
    assert compare("docker", "docker", caps=("CAP_SYS_ADMIN",)).differences == ()
    path = tmp_path / "all.json"
    path.write_text('{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}')
    rows = {row.call: (row.first, row.second) for row in compare(str(path), "restrictive", caps=()).differences}
    assert rows["(unknown numbers)"] == ("allow", "ENOSYS")
    assert rows["mount"] == ("allow", "EPERM")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["check", "restrictive"], 0),
        (["check", "docker", "--caps", "docker"], 0),
        (["check", "docker", "--runtime", "containerd"], 1),
        (["check", "docker", "--caps", "docker,CAP_SYS_ADMIN"], 1),
        (["diff", "restrictive", "restrictive"], 0),
        (["diff", "restrictive", "permissive"], 1),
        (["explain", "bpf", "--profile", "docker@24.0"], 0),
    ],
)
def test_the_commands_exit_status_and_both_forms(arguments: list[str], status: int) -> None:
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == status, text.output
    as_json = CliRunner().invoke(app, [*arguments, "-o", "json"])
    assert as_json.exit_code == status
    assert json.loads(as_json.output)


@pytest.mark.parametrize("arguments", [["--runtime", "podman"], ["--caps", "CAP_NONE"], ["--kernel", "x"]])
def test_wrong_use_of_check(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["check", "restrictive", *arguments])
    assert getattr(result.exception, "exit_code", result.exit_code) == 2
