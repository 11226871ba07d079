"""An engine that can be started, killed and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from syncstack.errors import DeadlineExceeded

KILL_S = 10.0
"""How long the kernel may take to end a process group that got SIGKILL."""


class Supervised(Protocol):
    """One engine, wherever it runs. Called from several threads, but ``start`` and ``kill`` one at a time."""

    name: str
    address: str
    """Of its control endpoint, the same after every start."""
    url: str
    """Of its own server."""

    def start(self) -> None:
        """Start it; does not wait until it answers."""
        ...

    def ended(self) -> str:
        """How it ended, or why it cannot be reached; "" while it runs. Does not block for long."""
        ...

    def kill(self) -> None:
        """End it and every process of its own, whatever state they are in. Blocks until they have ended; raises
        DeadlineExceeded."""
        ...


class EngineProcess:
    """An engine on this machine: ``syncstack engine ...`` in a session of its own, which a signal ends as a whole."""

    def __init__(
        self, name: str, *, address: str, url: str, argv: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        """``env``: its whole environment. ``log``: where its output is appended."""
        self.name = name
        self.address = address
        self.url = url
        self._argv = list(argv)
        self._env = dict(env)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._how = ""

    @property
    def pid(self) -> int | None:
        """Of its first process, which is also its process group's; None before the first start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """See Supervised. Raises OSError where the command cannot be run."""
        self.kill()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._how = ""

    def ended(self) -> str:
        """See Supervised."""
        process = self._process
        if process is None:
            return "it was never started"
        # Not reaped before `kill`: its number is its group's, and nobody else's as long as somebody waits for it.
        try:
            found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._how or "its process has ended"
        if found is None:
            return ""
        by_signal = found.si_code != os.CLD_EXITED
        self._how = f"its process {'was ended by signal' if by_signal else 'ended with'} {found.si_status}"
        return self._how

    def kill(self) -> None:
        """See Supervised. SIGKILL also ends what is stopped."""
        if self._process is None or self._process.returncode is not None:
            return
        self.ended()  # how it did by itself, if it did
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its workers too, where it itself has ended already
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"{self.name} has not ended {KILL_S:g} s after SIGKILL",
                observed=f"process {self._process.pid}",
                next_step="look what it waits for in the kernel: cat /proc/PID/stack, or its state in ps",
            ) from None
