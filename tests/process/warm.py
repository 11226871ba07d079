"""Python processes that have imported torch and transformers already: 14 s of CPU each, and a hundred are started.

A server is started once; it imports, and forks a process for each request: in a session of its own, with the
environment, arguments and descriptors that were asked for, in a mount namespace of its own and under a seccomp profile
where one was, and then runs a script as its main program. From there on it is a process like any other: what it shares
is the pages of imported modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

REPO = Path(__file__).parents[2]
MAX_MESSAGE = 1 << 20
LOOK_S = 0.02
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


class Warm:
    """The server, as the tests see it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-m", "tests.process.warm", str(theirs.fileno())]
        self._process = subprocess.Popen(argv, cwd=REPO, env=dict(env), pass_fds=[theirs.fileno()])
        theirs.close()
        self._ended: dict[int, int] = {}

    def start(
        self,
        script: Path,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        profile: str | None,
        private: str | None,
        fds: tuple[int, int, int],
    ) -> int:
        """Run ``script`` with ``argv`` and these stdin, stdout and stderr; returns the process number. ``private``: a
        folder that is empty for it and its own, as another container's would be."""
        request = {
            "script": str(script), "argv": list(argv), "env": dict(env), "profile": profile, "private": private
        }  # fmt: skip
        socket.send_fds(self._sock, [json.dumps(request).encode()], list(fds))
        while True:
            kind, pid, status = self._receive()
            if kind == "started":
                return pid
            self._ended[pid] = status

    def _receive(self) -> tuple[str, int, int]:
        data = self._sock.recv(MAX_MESSAGE)
        assert data, "the server of warm processes has ended"
        kind, pid, status = json.loads(data)
        return kind, pid, status

    def status(self, pid: int) -> int | None:
        """How a process ended, as ``subprocess`` has it; None while it runs."""
        while pid not in self._ended and readable(self._sock, 0):
            _, ended, status = self._receive()
            self._ended[ended] = status
        return self._ended.get(pid)

    def close(self) -> None:
        """End the server; what it has started ends with its tests."""
        self._sock.close()
        self._process.wait()


class WarmProcess:
    """The part of ``subprocess.Popen`` that the tests use. ``stdin``, ``stdout`` and ``stderr``: a file, or None for a
    pipe."""

    def __init__(
        self,
        warm: Warm,
        script: Path,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        profile: str | None = None,
        private: str | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self._warm = warm
        (inside_in, outside_in), (outside_out, inside_out), (outside_err, inside_err) = (os.pipe() for _ in range(3))
        given = (
            inside_in,
            inside_out if stdout is None else stdout.fileno(),
            inside_err if stderr is None else stderr.fileno(),
        )
        self.pid = warm.start(script, argv, env=env, profile=profile, private=private, fds=given)
        for fd in (inside_in, inside_out, inside_err):
            os.close(fd)
        self.stdin: IO[str] = os.fdopen(outside_in, "w")
        self.stdout: IO[str] = os.fdopen(outside_out)
        self.stderr: IO[str] = os.fdopen(outside_err)

    @property
    def returncode(self) -> int | None:
        """As ``poll``."""
        return self.poll()

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self._warm.status(self.pid)

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            found = self.poll()
            if found is not None:
                return found
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(LOOK_S)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of its output, once it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.wait(timeout)
        found = ("" if self.stdout.closed else self.stdout.read(), "" if self.stderr.closed else self.stderr.read())
        self.close()
        return found

    def close(self) -> None:
        """Close this side's ends of the pipes."""
        for file in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                file.close()


def readable(sock: socket.socket, wait_s: float) -> bool:
    """Whether something can be read within ``wait_s``. By poll: a process may have more than 1024 descriptors."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(wait_s * 1e3))


def serve(sock: socket.socket) -> dict[str, object] | None:
    """Start what is asked for until the tests hang up: None. In a process that was started: its request."""
    while True:
        ready = readable(sock, LOOK_S)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                sock.send(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode())
        if not ready:
            continue
        data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE, 3)
        if not data:
            return None
        begun, begin = os.pipe()
        pid = os.fork()
        if not pid:
            os.setsid()
            sock.close()
            become(fds)
            os.close(begun)
            os.close(begin)  # now it can be killed by its session
            request: dict[str, object] = json.loads(data)
            return request
        os.close(begin)
        os.read(begun, 1)
        for fd in (*fds, begun):
            os.close(fd)
        sock.send(json.dumps(["started", pid, 0]).encode())


def become(fds: Sequence[int]) -> None:
    """Take descriptors as stdin, stdout and stderr."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)


def hide(folder: str) -> None:
    """What ``unshare --mount`` and a mount of an empty tmpfs of this user's do."""
    libc = ctypes.CDLL(None, use_errno=True)
    data = f"mode=0700,uid={os.getuid()},gid={os.getgid()}".encode()
    for done in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, data),
    ):
        if done:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run(request: dict[str, object]) -> None:
    """Be the process that was asked for."""
    from syncstack.seccomp.apply import apply
    from syncstack.seccomp.load import load

    script, argv, env, profile, private = (request[name] for name in ("script", "argv", "env", "profile", "private"))
    assert isinstance(script, str) and isinstance(argv, list) and isinstance(env, dict)
    os.environ.clear()
    os.environ.update(env)
    if private is not None:
        hide(str(private))
    if profile is not None:
        apply(load(str(profile)))
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """The server: import, wait, fork."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import syncstack.cli
    import syncstack.engines.reference.engine
    import syncstack.refit.coordinator
    import syncstack.seccomp.load  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = serve(sock)
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run(request)


if __name__ == "__main__":
    main()
