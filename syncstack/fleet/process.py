"""A command in a process group of its own, which a signal ends as a whole, and which ends with whoever started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from syncstack.errors import DeadlineExceeded
from syncstack.facts.process import read_text
from syncstack.fleet import tether

KILL_S = 10.0
"""How long the kernel may take to end a process group that got SIGKILL."""

POLL_S = 0.02


class GroupProcess:
    """One command, started any number of times, one process group at a time."""

    def __init__(self, name: str, *, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """``env``: its whole environment. ``log``: where its output is appended."""
        self.name = name
        self._argv = list(argv)
        self._env = dict(env)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._tie = -1

    @property
    def pid(self) -> int | None:
        """Of its first process, which is also its process group's; None before the first start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it; does not wait until it does anything. A command that cannot be run ends at once, with 127."""
        self.kill()
        theirs, self._tie = os.pipe()  # neither is inherited by anybody else that this process starts
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", tether.__file__, str(theirs), *self._argv],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(theirs,),
                )
        except BaseException:
            self._untie()
            raise
        finally:
            os.close(theirs)

    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs. Does not reap it."""
        process = self._process
        assert process is not None
        if process.returncode is not None:
            return process.returncode
        # Not reaped before `kill`: its number is its group's, and nobody else's as long as somebody waits for it.
        try:
            found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return process.returncode or 0
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def ended(self) -> str:
        """How it ended; "" while it runs. Does not block."""
        if self._process is None:
            return "it was never started"
        status = self.status()
        if status is None:
            return ""
        return f"its process {'was ended by signal' if status < 0 else 'ended with'} {abs(status)}"

    def signal(self, number: int) -> None:
        """Send a signal to all of it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it and every process of its own, whatever state they are in: SIGKILL also ends what is stopped. Blocks
        until they have ended; raises DeadlineExceeded."""
        if self._process is None or self._process.returncode is not None:
            return
        self.signal(signal.SIGKILL)  # its workers too, where it itself has ended already
        deadline = time.monotonic() + KILL_S
        while left := alive_in(self._process.pid):  # the memory of a GPU and a port are free when the last has ended
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{self.name} has not ended {KILL_S:g} s after SIGKILL",
                    observed="process " + ", ".join(map(str, left)),
                    next_step="look what it waits for in the kernel: cat /proc/PID/stack, or its state in ps",
                )
            time.sleep(POLL_S)
        self._process.wait()
        self._untie()

    def _untie(self) -> None:
        os.close(self._tie)
        self._tie = -1


def alive_in(group: int) -> list[int]:
    """The processes of a group that have not ended; one that nobody has waited for yet has."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # State and process group come after the name, which may hold anything.
        fields = read_text(stat).rpartition(")")[2].split()
        if len(fields) > 2 and fields[0] not in ("Z", "X") and int(fields[2]) == group:
            found.append(int(stat.parent.name))
    return found
