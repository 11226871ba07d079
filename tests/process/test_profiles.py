"""The profiles on real processes: what each probed system call answers, and that ordinary programs go on working."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from syncstack.seccomp.expected import expected

REPOSITORY = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "syncstack.cli", "seccomp", "run")
PROFILES = ("permissive", "restrictive")

HELPERS = """
import ctypes, errno, json, os, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(arg) for arg in args))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else result
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=60, check=False)


def run_python(profile: str, code: str, *options: str) -> Any:
    """Run Python code under a profile; return what it printed last, as JSON."""
    done = run(profile, *options, "--", sys.executable, "-W", "error", "-c", HELPERS + code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def docker_format(tmp_path: Path, **fields: Any) -> str:
    """Write a profile that allows everything this test does not name, and return its path."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(fields))
    return str(path)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("by", ["name", "file"])
def test_probed_calls_answer_as_expected(profile: str, by: str) -> None:
    given = profile if by == "name" else str(REPOSITORY / "seccomp" / f"{profile}.json")
    done = run(given, "--", sys.executable, "-m", "syncstack.facts")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert {name: fact["verdict"] for name, fact in facts["syscalls"].items()} == dict(expected(profile))
    assert (facts["seccomp_mode"], facts["no_new_privs"]) == (2, True)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_filter_holds_in_children_of_children(profile: str) -> None:
    code = """
inner = [sys.executable, "-m", "syncstack.facts"]
outer = [sys.executable, "-c", f"import subprocess; subprocess.run({inner!r}, check=True)"]
facts = json.loads(subprocess.run(outer, capture_output=True, text=True, check=True).stdout)
print(json.dumps({name: fact["verdict"] for name, fact in facts["syscalls"].items()}))
"""
    assert run_python(profile, code) == dict(expected(profile))


@pytest.mark.parametrize("profile", PROFILES)
def test_threads_fork_exec_and_sockets_work(profile: str) -> None:
    code = """
import array, multiprocessing
seen = []
threads = [threading.Thread(target=seen.append, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
pid = os.fork()
if pid == 0:
    os._exit(3)
forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
executed = subprocess.run([sys.executable, "-c", "import ctypes; raise SystemExit(5)"]).returncode
memfd = os.memfd_create("test")
os.write(memfd, b"weights")
left, right = socket.socketpair()
socket.send_fds(left, [b"x"], [memfd])
_, (received,), _, _ = socket.recv_fds(right, 1, 1)
text = os.pread(received, 7, 0).decode()
with multiprocessing.get_context("spawn").Pool(1) as pool:
    pooled = pool.apply(len, ("four",))
print(json.dumps([sorted(seen), forked, executed, text, pooled]))
"""
    assert run_python(profile, code) == [[0, 1, 2, 3], 3, 5, "weights", 4]


@pytest.mark.parametrize("profile", PROFILES)
def test_unknown_numbers_answer_enosys(profile: str) -> None:
    assert run_python(profile, "print(json.dumps([call(9999), call(600)]))") == ["ENOSYS", "ENOSYS"]


@pytest.mark.parametrize("profile", PROFILES)
def test_namespace_flags_and_socket_families_are_refused(profile: str) -> None:
    number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    code = f"""
def family(value):
    try:
        socket.socket(value, socket.SOCK_DGRAM).close()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
flags = [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x10020000]
clones = sorted({{call({number}, flag | 17, 0, 0, 0, 0) for flag in flags}})
print(json.dumps([clones, [family(value) for value in (1, 2, 10, 38, 40, 46)]]))
"""
    assert run_python(profile, code) == [["EPERM"], ["ok", "ok", "ok", "EPERM", "EPERM", "EPERM"]]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_32_bit_call_ends_the_process(profile: str) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("x32 calls exist on x86_64 only")
    x32_getpid = 0x40000000 + 39
    done = run(profile, "--", sys.executable, "-c", HELPERS + f"call({x32_getpid})")
    assert done.returncode == -signal.SIGSYS


def test_a_thread_that_was_there_before_is_filtered_too() -> None:
    """TSYNC: programs that import torch have threads before they can apply anything."""
    code = """
from syncstack.seccomp.apply import apply
from syncstack.seccomp.load import load
go, seen = threading.Event(), []
thread = threading.Thread(target=lambda: (go.wait(), seen.append(call(438, -1, 0, 0))))
thread.start()
seen.append(call(438, -1, 0, 0))
applied = apply(load("restrictive"))
go.set()
thread.join()
print(json.dumps([seen, applied.not_denied]))
"""
    done = subprocess.run(
        [sys.executable, "-c", HELPERS + code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == [["EBADF", "EPERM"], []]


@pytest.mark.parametrize(
    ("caps", "answer"),
    [("none", "EPERM"), ("docker", "EPERM"), ("CAP_SYS_PTRACE", "EBADF"), ("cap_sys_ptrace", "EBADF")],
)
def test_dockers_conditions_are_decided_for_the_given_capabilities(tmp_path: Path, caps: str, answer: str) -> None:
    rule = {"names": ["pidfd_getfd"], "action": "SCMP_ACT_ERRNO", "excludes": {"caps": ["CAP_SYS_PTRACE"]}}
    path = docker_format(tmp_path, defaultAction="SCMP_ACT_ALLOW", syscalls=[rule])
    assert run_python(path, "print(json.dumps(call(438, -1, 0, 0)))", "--caps", caps) == answer


def test_a_default_of_eperm_still_answers_enosys_above_the_highest_call(tmp_path: Path) -> None:
    """As runc does for Docker's own profile."""
    document = json.loads((REPOSITORY / "seccomp" / "permissive.json").read_text())
    allowed = [rule for rule in document["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW"]
    path = docker_format(tmp_path, defaultAction="SCMP_ACT_ERRNO", syscalls=allowed)
    # 425 is io_uring_setup: below the highest, and not named here.
    assert run_python(path, "print(json.dumps([call(425, 0, 0), call(9999)]))") == ["EPERM", "ENOSYS"]


def test_a_denied_name_that_is_unknown_is_reported(tmp_path: Path) -> None:
    rule = {"names": ["ptrase", "ptrace"], "action": "SCMP_ACT_ERRNO"}
    path = docker_format(tmp_path, defaultAction="SCMP_ACT_ALLOW", syscalls=[rule])
    done = run(path, "--", "true")
    assert done.returncode == 0
    assert "NOT DENIED" in done.stderr
    assert "ptrase" in done.stderr


def test_explain_lists_the_names_that_were_skipped(tmp_path: Path) -> None:
    allow_all_but = {"names": ["no_such_call"], "action": "SCMP_ACT_ALLOW"}
    path = docker_format(tmp_path, defaultAction="SCMP_ACT_LOG", syscalls=[allow_all_but])
    assert "no_such_call" in run(path, "--explain", "--", "true").stderr
    assert run(path, "--", "true").stderr == ""


def test_the_commands_exit_status_is_passed_on() -> None:
    assert run("restrictive", "--", "sh", "-c", "exit 7").returncode == 7


@pytest.mark.parametrize(
    "fields",
    [
        {"defaultAction": "SCMP_ACT_ALOW"},
        {"defaultAction": "SCMP_ACT_NOTIFY"},
        {"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_ARM"]},
        {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["ptrace"], "action": "SCMP_ACT_DENY"}]},
        {
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [
                {"names": ["ptrace"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 0, "value": 1, "op": "EQ"}]}
            ],
        },
        {"defaultAktion": "SCMP_ACT_ALLOW"},
    ],
)
def test_a_bad_profile_exits_2_and_starts_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    mark = tmp_path / "started"
    done = run(docker_format(tmp_path, **fields), "--", "touch", str(mark))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not mark.exists()


def test_an_unknown_profile_and_an_unknown_command_exit_2() -> None:
    unknown = run("strict", "--", "true")
    assert (unknown.returncode, "permissive, restrictive" in unknown.stderr) == (2, True)
    missing = run("restrictive", "--", "no-such-command")
    assert (missing.returncode, "no-such-command" in missing.stderr) == (2, True)
