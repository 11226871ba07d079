"""Processes of a GPU benchmark: as nobody, without a capability, in namespaces of their own, answering commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOBODY = 65534
POWERLESS = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all")
APART = ("unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
ROOT = Path(__file__).parents[1]


def start(
    arguments: Sequence[str],
    home: Path,
    *,
    apart: bool,
    expandable: bool,
    pipes: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """A Python process with its caches under ``home``; ``apart``: in PID and IPC namespaces of its own."""
    home.mkdir(exist_ok=True)
    os.chown(home, NOBODY, NOBODY)
    environ = {
        **os.environ,
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}",
        "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "TRITON_CACHE_DIR": str(home / "triton"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        "SYNCSTACK_ENGINE_READY_S": "240",
        **(env or {}),
    }
    command = [*(APART if apart else ()), *POWERLESS, sys.executable, *arguments]
    return subprocess.Popen(command, text=True, env=environ, cwd=ROOT, start_new_session=True, **pipes)


def end(process: subprocess.Popen[str]) -> None:
    """At once, with what unshare started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


class Child:
    """A process that answers commands, each a line of JSON."""

    def __init__(self, arguments: Sequence[str], home: Path, *, apart: bool, expandable: bool) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = start(arguments, home, apart=apart, expandable=expandable, pipes=pipes)
        self.hello = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a child ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, do: str, **parts: Any) -> dict[str, Any]:
        """The answer to one command; RuntimeError where it says an error."""
        found = self.try_to(do, **parts)
        if "error" in found:
            raise RuntimeError(f"{do}: {found['error']}")
        return found

    def try_to(self, do: str, **parts: Any) -> dict[str, Any]:
        """The answer, whatever it is."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, "with": parts}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        """At once."""
        end(self.process)
