"""Recording real commands: what they call, what is refused to them, and the allow-list that comes out."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
SECCOMP = (sys.executable, "-m", "syncstack.cli", "seccomp")
# A sealed memfd by SCM_RIGHTS to a child, under a thread: what syncstack itself lives on.
PROGRAM = """
import fcntl, os, socket, subprocess, sys, threading
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
memfd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
os.write(memfd, b"weights")
fcntl.fcntl(memfd, 1033, 0xf)
left, right = socket.socketpair()
code = "import os, socket; print(os.pread(socket.recv_fds(socket.socket(fileno=9), 1, 1)[1][0], 7, 0))"
os.dup2(right.fileno(), 9)
child = subprocess.Popen([sys.executable, "-c", code], pass_fds=(9,))
socket.send_fds(left, [b"x"], [memfd])
raise SystemExit(child.wait())
"""


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [*SECCOMP, *arguments], capture_output=True, text=True, timeout=60, check=False, env=environment, **options
    )


def record(*arguments: str, **options: Any) -> tuple[Any, dict[str, Any], subprocess.CompletedProcess[str]]:
    """Record, as JSON; return the recording, its calls by name and the process."""
    done = run("record", "-o", "json", *arguments, **options)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    return found, {used["name"]: used for used in found["calls"]}, done


def test_counts_are_those_of_strace(tmp_path: Path) -> None:
    """An independent witness, on a program that does the same each time."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: nothing to compare with")
    command = ["sh", "-c", "cat /dev/null; test -e /no/such/file; true & wait; exit 3"]
    _, calls, done = record("--", *command)
    assert done.returncode == 3
    out = tmp_path / "strace"
    subprocess.run(["strace", "-f", "-qq", "-o", str(out), *command], check=False, timeout=60)
    # wait4 and the end of the background child come in either order: "resumed" lines are the second half of a call.
    lines = [line for line in out.read_text().splitlines() if "resumed>" not in line]
    names = [match[1] for line in lines if (match := re.match(r"\d+ +(\w+)\(", line))]
    seen = {name: names.count(name) for name in set(names)}
    timing = {"wait4", "rt_sigreturn"}  # whether the shell waits once or twice depends on who is first
    assert {name: used["calls"] for name, used in calls.items() if name not in timing} == {
        name: times for name, times in seen.items() if name not in timing
    }


def test_answers_are_counted_by_errno() -> None:
    code = "import os\nfor path in ('/no/1', '/no/2', '/'): os.path.exists(path)\nos.access('/no/3', 0)"
    _, calls, done = record("--", sys.executable, "-I", "-S", "-c", code)
    assert done.returncode == 0
    assert calls["newfstatat" if "newfstatat" in calls else "statx"]["errors"]["ENOENT"] >= 2
    assert calls["exit_group"] == {"name": "exit_group", "calls": 1, "errors": {}, "refused": 0}


def test_what_a_profile_refuses_is_told_from_what_the_kernel_refuses() -> None:
    """kill(1) as another user is refused by the kernel; pidfd_open by the profile. Both answer EPERM."""
    code = """
import ctypes, os
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for call in (lambda: os.kill(1, 0), lambda: os.pidfd_open(os.getpid())):
    try: call()
    except PermissionError: pass
"""
    _, calls, done = record("--profile", "restrictive", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert (calls["pidfd_open"]["errors"], calls["pidfd_open"]["refused"]) == ({"EPERM": 1}, 1)
    assert (calls["kill"]["errors"], calls["kill"]["refused"]) == ({"EPERM": 1}, 0)
    text = run("record", "--profile", "restrictive", "--", sys.executable, "-c", code).stdout
    refused = text.split("refused by restrictive:")[1]
    assert "pidfd_open" in refused
    assert "kill" not in refused
    # Without a profile of ours nobody can tell, and the report says so.
    assert "by a filter or by the kernel itself" in run("record", "--", "true").stdout


def test_a_call_that_ends_the_process_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kill.json"
    rule = {"names": ["pidfd_open"], "action": "SCMP_ACT_KILL_PROCESS"}
    path.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}))
    code = "import os; os.pidfd_open(os.getpid())"
    found, calls, done = record("--profile", str(path), "--", sys.executable, "-c", code)
    assert (found["exit"], found["ended_in"], done.returncode) == (-signal.SIGSYS, "pidfd_open", 128 + signal.SIGSYS)
    assert calls["pidfd_open"]["refused"] == 1


@pytest.mark.parametrize("profile", [None, "restrictive"])
def test_what_was_recorded_is_enough_to_run_again(tmp_path: Path, profile: str | None) -> None:
    """Threads, a child, a memfd and SCM_RIGHTS: under the allow-list alone, with every other call absent."""
    path = tmp_path / "allow.json"
    under = [] if profile is None else ["--profile", profile]
    _, _, done = record(*under, "--write", str(path), "--", sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert {"thread", "b'weights'"} <= set(done.stderr.split("\n")), "the command's output goes to standard error"
    again = run("run", str(path), "--", sys.executable, "-c", PROGRAM)
    assert (again.returncode, set(again.stdout.split())) == (0, {"thread", "b'weights'"}), again.stderr
    document = json.loads(path.read_text())
    allowed = {name for rule in document["syscalls"] for name in rule["names"] if rule["action"] == "SCMP_ACT_ALLOW"}
    assert {"memfd_create", "sendmsg", "socketpair"} <= allowed
    assert not {"clone3", "mount", "unshare", "bpf", "pidfd_getfd"} & allowed
    # It is a list for one program, and opens nothing that leads out: only needs can be unmet.
    findings = json.loads(run("check", str(path), "-o", "json").stdout)["readings"]
    kinds = {finding["kind"] for reading in findings for finding in reading["findings"] if finding["level"] == "fail"}
    assert kinds <= {"needed"}


def test_the_allow_list_refuses_what_was_not_seen(tmp_path: Path) -> None:
    path = tmp_path / "allow.json"
    run("record", "--write", str(path), "--", sys.executable, "-c", "pass")
    code = "import os; os.memfd_create('x')"
    done = run("run", str(path), "--", sys.executable, "-c", code)
    assert "Function not implemented" in done.stderr
    # And stays refused where a profile refused it each time.
    pidfd = "import os\ntry: os.pidfd_open(1)\nexcept PermissionError: pass"
    run("record", "--profile", "restrictive", "--write", str(path), "--", sys.executable, "-c", pidfd)
    assert "pidfd_open" not in path.read_text()


def test_arguments_that_our_profiles_refuse_are_reported_and_kept(tmp_path: Path) -> None:
    """A program that needs such a family or flag gets it, and the report says so."""
    path = tmp_path / "allow.json"
    code = """
import errno, socket
try: print("opened", socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET) is None)
except OSError as error: print(errno.errorcode[error.errno])
"""
    found, _, done = record("--write", str(path), "--", sys.executable, "-c", code)
    assert found["unusual"] == ["socket"]
    again = run("run", str(path), "--", sys.executable, "-c", code)
    # The kernel's own answer, whether it has such sockets or not.
    assert (again.returncode, again.stdout) == (0, done.stderr)
    assert run("run", "restrictive", "--", sys.executable, "-c", code).stdout == "EPERM\n" != done.stderr
    assert "with arguments that our profiles refuse: socket" in run("record", "--", sys.executable, "-c", code).stdout


def test_it_needs_no_privilege() -> None:
    """Without any capability: whatever the user may be, nothing but ptrace on one's own child is asked for."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    drop = ["setpriv", "--no-new-privs", "--inh-caps=-all", *(["--bounding-set=-all"] if os.getuid() == 0 else [])]
    command = [*drop, *SECCOMP, "record", "-o", "json", "--", "sh", "-c", "grep CapEff /proc/self/status; exit 4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=REPOSITORY)
    assert (json.loads(done.stdout)["exit"], done.returncode) == (4, 4)
    assert int(done.stderr.split()[1], 16) == 0


def test_signals_stops_and_threads_pass_through() -> None:
    """A stopped child goes on, an exec out of a thread keeps its process, a pipe that closes ends its writer."""
    script = """
sleep 0.2 & kill -STOP $!; kill -CONT $!; wait $! || exit 11
( kill -TERM $$ ) ; exit 12
"""
    found, _, done = record("--", "sh", "-c", script)
    assert (found["exit"], done.returncode) == (-signal.SIGTERM, 128 + signal.SIGTERM)
    code = """
import os, threading
threading.Thread(target=os.execvp, args=("sh", ["sh", "-c", "exit 5"])).start()
threading.Event().wait()
"""
    assert record("--", sys.executable, "-c", code)[0]["exit"] == 5
    assert record("--", "sh", "-c", "yes | head -1")[0]["exit"] == 0


def test_children_that_were_there_before_are_not_waited_for() -> None:
    """A shell that starts something and then becomes the recorder leaves it a child that is not the command's."""
    recorder = shlex.join([*SECCOMP, "record", "--", "true"])
    script = f"sleep 40 >/dev/null 2>&1 & echo $! >&2; exec {recorder}"
    started = time.monotonic()
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=REPOSITORY)
    assert done.returncode == 0
    assert time.monotonic() - started < 20
    os.kill(int(done.stderr.split()[0]), signal.SIGKILL)


def test_run_gives_back_the_signals_that_python_ignores() -> None:
    ignored = "grep SigIgn /proc/self/status"
    plain = subprocess.run(["sh", "-c", ignored], capture_output=True, text=True, check=True, timeout=30).stdout
    assert run("run", "restrictive", "--", "sh", "-c", ignored).stdout == plain


def test_the_deadline_kills_everything_and_reports() -> None:
    marker = f"30.{os.getpid()}"
    started = time.monotonic()
    found, calls, done = record("--timeout", "1", "--", "sh", "-c", f"sleep {marker} & sleep {marker}")
    assert time.monotonic() - started < 20
    assert (found["exit"], done.returncode) == (None, 1)
    assert calls["clock_nanosleep" if "clock_nanosleep" in calls else "nanosleep"]["calls"] == 2
    assert "--timeout" in done.stderr
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if marker in cmdline(path)]
    assert left == []


def cmdline(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def test_what_cannot_be_recorded_exits_2(tmp_path: Path) -> None:
    missing = run("record", "--", "no-such-command")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "no-such-command" in missing.stderr
    assert run("record", "--profile", "no-such-profile", "--", "true").returncode == 2


def test_under_a_filter_without_ptrace_it_says_what_to_do() -> None:
    """In a container with the restrictive profile: refused, and one line says how to record all the same."""
    done = run("run", "restrictive", "--", *SECCOMP, "record", "--", "true")
    assert done.returncode == 2
    assert "PTRACE_SEIZE" in done.stderr
    assert "--profile" in done.stderr
    # Docker's built-in profile allows it to its own children.
    assert run("run", "docker", "--caps", "docker", "--", *SECCOMP, "record", "--", "true").returncode == 0
