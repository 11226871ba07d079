"""A command that is ended as a whole, says how it ended, and does not outlive whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from syncstack.fleet.process import GroupProcess, alive_in

WATCHDOG_S = 20.0


def made(folder: Path, code: str) -> GroupProcess:
    return GroupProcess("x", argv=[sys.executable, "-c", code], env=dict(os.environ), log=folder / "log")


def awaited(process: GroupProcess) -> str:
    deadline = time.monotonic() + WATCHDOG_S
    while not process.ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process.ended()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + WATCHDOG_S
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_written(path: Path) -> int:
    deadline = time.monotonic() + WATCHDOG_S
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


@pytest.mark.parametrize(
    ("code", "said", "status"),
    [
        ("raise SystemExit(3)", "its process ended with 3", 3),
        ("pass", "its process ended with 0", 0),
        ("import os; os.kill(os.getpid(), 9)", "its process was ended by signal 9", -9),
        ("import os; os.kill(os.getpid(), 15)", "its process was ended by signal 15", -15),
    ],
)
def test_it_says_how_its_command_ended(tmp_path: Path, code: str, said: str, status: int) -> None:
    process = made(tmp_path, code)
    assert process.ended() == "it was never started"
    process.start()
    assert awaited(process) == said
    assert process.status() == status
    process.kill()
    assert (process.ended(), process.status()) == (said, status)


def test_a_command_that_cannot_be_run_ends_with_its_reason_in_the_log(tmp_path: Path) -> None:
    process = GroupProcess("x", argv=["/no/such/command"], env={}, log=tmp_path / "log")
    process.start()
    assert awaited(process) == "its process ended with 127"
    assert "/no/such/command cannot be run" in (tmp_path / "log").read_text()
    process.kill()


CHILD = """
import pathlib, subprocess, sys, time

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
pathlib.Path("{path}").write_text(f"{{child.pid}}\\n")
time.sleep(100)
"""


def test_its_children_end_with_it_even_when_all_are_stopped(tmp_path: Path) -> None:
    process = made(tmp_path, CHILD.format(path=tmp_path / "pid"))
    process.start()
    child = until_written(tmp_path / "pid")
    process.signal(signal.SIGSTOP)
    assert process.pid is not None
    assert child in alive_in(process.pid)
    process.kill()
    assert gone(child), "it blocks until all have ended"
    assert not alive_in(process.pid)
    assert process.ended() == "its process was ended by signal 9"
    fds = len(os.listdir("/proc/self/fd"))
    process.start()
    process.kill()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_signal_reaches_the_command_and_not_only_what_holds_it(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = made(
        tmp_path,
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"pathlib.Path({str(ready)!r}).write_text('1\\n')\n"
        "time.sleep(100)",
    )
    process.start()
    until_written(ready)
    process.signal(signal.SIGTERM)
    assert awaited(process) == "its process ended with 7"
    process.kill()


def test_it_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    """From a thread that has ended meanwhile: it must follow the process and not the thread."""
    code = (
        "import os, pathlib, sys, threading, time\n"
        "from syncstack.fleet.process import GroupProcess\n"
        f"p = GroupProcess('x', argv=[sys.executable, '-c', {CHILD.format(path=tmp_path / 'pid')!r}],\n"
        f"                 env=dict(os.environ), log=pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "t = threading.Thread(target=p.start); t.start(); t.join()\n"
        "time.sleep(100)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code])
    child = until_written(tmp_path / "pid")
    time.sleep(0.2)
    assert not gone(child)
    starter.kill()
    starter.wait(10)
    until_gone(child)


def test_its_command_ends_when_only_what_holds_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    process = made(
        tmp_path,
        f"import os, pathlib, time; pathlib.Path({str(path)!r}).write_text(f'{{os.getpid()}}\\n'); time.sleep(100)",
    )
    process.start()
    command = until_written(path)
    assert process.pid is not None
    assert process.pid != command
    os.kill(process.pid, signal.SIGKILL)
    until_gone(command)
    process.kill()
