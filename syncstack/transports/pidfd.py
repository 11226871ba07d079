"""Take a descriptor out of another process: pidfd_open, then pidfd_getfd. For processes that share a PID namespace.

A process number is worth nothing by itself. In another PID namespace it is a stranger's or nobody's, after a while it
is somebody else's, and a wrong process hands out a wrong descriptor without any error. So the sender says in which
namespace its number counts and when it started, the receiver looks before and after it has taken hold of the process,
and what it gets is checked like any descriptor that comes over a link (``host_fd/segment.py``: seals, size, nonce).

The kernel lets a process do this to another of its own uid and gid that is dumpable, and to nobody else, unless it has
CAP_SYS_PTRACE; Yama and security modules may forbid that too. The other way, SCM_RIGHTS, needs none of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
from pathlib import Path

import msgspec

from syncstack.errors import HandleRefused, TransportError
from syncstack.facts.process import life, read_text

_SYS_PIDFD_GETFD = 438  # on every architecture: it is newer than the common table
_PR_GET_DUMPABLE = 3
_INSTEAD = "or share a folder between trainer and engine: descriptors sent over a unix socket need none of this"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process, so that no other can be taken for it: see ``wire.messages.Handle``."""

    pid: int
    pid_ns: int
    start_ticks: int


def myself() -> Process:
    """This process, as its peers may look for it. Raises TransportError where they could not take anything from it."""
    own = numbers()
    dumpable = ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    if dumpable != 1:
        raise TransportError(
            "this process is not dumpable, so no other may take a descriptor from it",
            observed=f"PR_GET_DUMPABLE = {dumpable}",
            expected="1",
            consequence="Nothing was sent",
            next_step="start it as its user instead of changing the user while it runs, " + _INSTEAD,
        )
    return own


def numbers() -> Process:
    """This process, as others may recognise it. Raises HandleRefused where it cannot know how it is numbered."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        shown = str(Path("/proc/self").readlink())
    except OSError as error:
        raise _unproven("/proc does not show this process", str(error), "a /proc of its own PID namespace") from None
    if shown != str(os.getpid()):
        raise _unproven(
            "/proc is that of another PID namespace", f"/proc/self is {shown}", f"{os.getpid()}, this process"
        )
    ticks = _start_ticks(os.getpid())
    assert ticks is not None
    return Process(pid=os.getpid(), pid_ns=namespace, start_ticks=ticks)


def _start_ticks(pid: int) -> int | None:
    """When a process started; None without such a process."""
    found = life(pid)
    return None if found is None else found[1]


def take(process: Process, fd: int) -> int:
    """A copy of descriptor ``fd`` of ``process``, close-on-exec; the caller owns it and must check what it is.

    Raises HandleRefused and holds nothing then.
    """
    own = numbers()
    if process.pid_ns != own.pid_ns:
        raise _unproven(
            "trainer and engine are in different PID namespaces, where process numbers mean different processes",
            f"namespace {process.pid_ns}",
            f"namespace {own.pid_ns}",
        )
    _prove(process)
    pidfd = _open(process)
    try:
        _prove(process)  # the number may have passed to another process before we had hold of it
        return _getfd(pidfd, process, fd)
    finally:
        os.close(pidfd)


def _prove(process: Process) -> None:
    found = _start_ticks(process.pid)
    if found != process.start_ticks:
        raise _unproven(
            f"process {process.pid} is not the sender",
            "no such process" if found is None else f"it started at tick {found}",
            f"started at tick {process.start_ticks}",
        )


def _open(process: Process) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno == errno.ESRCH:
            raise _gone(process, "pidfd_open") from None
        # The kernel asks for no permission here.
        raise _refused("pidfd_open", error.errno, _filter_or_kernel("pidfd_open", error.errno)) from None


def _getfd(pidfd: int, process: Process, fd: int) -> int:
    found, code = _call(pidfd, fd)
    if not code:
        return found
    if code == errno.ESRCH:
        raise _gone(process, "pidfd_getfd")
    if code == errno.EBADF:
        raise HandleRefused(
            f"the sender, process {process.pid}, has no descriptor {fd}",
            observed="pidfd_getfd: EBADF",
            consequence="Nothing was mapped",
            next_step="run the same syncstack release on both sides; the sender may have given up this segment",
        )
    if code == errno.EPERM and _call(-1, 0)[1] == errno.EBADF:  # without a target it is reached: no filter
        raise _refused("pidfd_getfd", code, _ptrace_rule(process))
    raise _refused("pidfd_getfd", code, _filter_or_kernel("pidfd_getfd", code))


def _call(pidfd: int, fd: int) -> tuple[int, int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_long(value) for value in (_SYS_PIDFD_GETFD, pidfd, fd, 0)))
    return int(result), ctypes.get_errno() if result == -1 else 0


def _filter_or_kernel(name: str, code: int | None) -> str:
    if code in (errno.EPERM, errno.EACCES):
        return f"a seccomp filter denies {name}"
    if code == errno.ENOSYS:
        since = {"pidfd_open": (5, 3), "pidfd_getfd": (5, 6)}[name]
        release = platform.release()
        if _version(release) >= since:
            return f"a seccomp filter or a sandbox hides {name}: kernel {release} has it"
        return f"kernel {release} has no {name}, which came with {since[0]}.{since[1]}"
    if code in (errno.EMFILE, errno.ENFILE):
        return "no descriptor is free in this process or on this machine"
    return f"{name} answered {os.strerror(code or 0)}"


def _version(release: str) -> tuple[int, int]:
    parts = [part for part in release.replace("-", ".").split(".") if part.isdigit()]
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 else (0, 0)


def _ptrace_rule(process: Process) -> str:
    """Which part of the kernel's rule for looking into another process says no."""
    lines = read_text(Path(f"/proc/{process.pid}/status")).splitlines()
    for kind, own in (("Uid:", os.getuid()), ("Gid:", os.getgid())):
        theirs = next((line.split()[1:4] for line in lines if line.startswith(kind)), [])
        if set(theirs) - {str(own)}:
            return f"the sender has another {kind[:3].lower()} ({', '.join(theirs)}) than this process ({own})"
    scope = read_text(Path("/proc/sys/kernel/yama/ptrace_scope"))
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/ns/user").readlink()  # asks the same, but for Yama and for security modules
        if scope not in ("", "0"):
            return f"Yama forbids it (/proc/sys/kernel/yama/ptrace_scope is {scope})"
        return "a security module of the kernel forbids it"
    return "the sender is not dumpable, or has a capability or a user namespace that this process has not"


def _refused(name: str, code: int | None, cause: str) -> HandleRefused:
    return HandleRefused(
        f"the sender's memory cannot be opened: {cause}",
        observed=f"{name}: {errno.errorcode.get(code or 0, str(code))}",
        consequence="Nothing was mapped",
        next_step=f"allow it, {_INSTEAD}",
    )


def _gone(process: Process, name: str) -> HandleRefused:
    return HandleRefused(
        f"the sender, process {process.pid}, has ended", observed=f"{name}: ESRCH", consequence="Nothing was mapped"
    )


def _unproven(what: str, observed: str, expected: str) -> HandleRefused:
    return HandleRefused(
        what,
        observed=observed,
        expected=expected,
        consequence="Nothing was opened",
        next_step="share the PID namespace (Kubernetes: shareProcessNamespace), " + _INSTEAD,
    )
