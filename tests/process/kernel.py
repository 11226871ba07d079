"""Make real causes: namespaces, filters, dropped rights. For scenarios that run in a process of their own, as root.

Imported by the scenario's process, which has one thread: forks are safe here.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from syncstack.facts import Claim, process
from syncstack.facts.identity import dumpable
from syncstack.facts.syscalls import answer_of, call
from syncstack.seccomp.apply import apply
from syncstack.seccomp.load import load

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_DUMPABLE, PR_CAPBSET_DROP = 4, 24
MS_REC_PRIVATE, MS_BIND = 0x44000, 0x1000
CHOWN, IPC_LOCK, SYS_PTRACE = 0, 14, 19
PIDFD_OPEN, PIDFD_GETFD = 434, 438
SKIPPED = 77

libc = ctypes.CDLL(None, use_errno=True)


def skip(reason: str) -> NoReturn:
    """End this process; the test shows the reason."""
    sys.stdout.write(reason)
    sys.stdout.flush()
    os._exit(SKIPPED)


def must(result: int, what: str) -> None:
    """Skip where this kernel or this root does not let the cause be made."""
    if result != 0:
        skip(f"{what}: {os.strerror(ctypes.get_errno())}")


def unshare(flags: int) -> None:
    must(libc.unshare(flags), f"unshare({flags:#x})")
    if flags & NEWNS:
        must(libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None), "mount --make-rprivate /")


def own_user_namespace(uid: int) -> None:
    """Enter a user namespace in which this process has every capability and is called ``uid``."""
    unshare(NEWUSER)
    Path("/proc/self/uid_map").write_text(f"{uid} 0 1")


def mount(kind: str, where: Path | str, options: str = "") -> None:
    must(libc.mount(kind.encode(), str(where).encode(), kind.encode(), 0, options.encode()), f"mount {kind}")


def bind(source: Path, where: str) -> None:
    must(libc.mount(str(source).encode(), where.encode(), None, MS_BIND, None), f"mount --bind {where}")


def deny(number_or_name: str, errno: int) -> None:
    """Load a filter that answers ``errno`` to one call and allows the rest."""
    rule = {"names": [number_or_name], "action": "SCMP_ACT_ERRNO", "errnoRet": errno}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}, file)
        file.flush()
        apply(load(file.name))


def become(uid: int, gid: int, *, visible: bool = True) -> None:
    """Change the user for good. That makes a process non-dumpable; ``visible`` undoes it."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    libc.prctl(PR_SET_DUMPABLE, int(visible), 0, 0, 0)


def drop(*capabilities: int) -> None:
    """Give up capabilities: effective, permitted and bounding."""
    for capability in capabilities:
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    must(libc.capget(header, data), "capget")
    for capability in capabilities:
        word, bit = divmod(capability, 32)
        data[3 * word] &= ~(1 << bit) & 0xFFFFFFFF
        data[3 * word + 1] &= ~(1 << bit) & 0xFFFFFFFF
    must(libc.capset(header, data), "capset")


def raw_getfd(pid: int, fd: int) -> str:
    """What the kernel says, without any of the product's caution."""
    pidfd, code = call(PIDFD_OPEN, pid, 0)
    if pidfd < 0:
        return f"pidfd_open: {answer_of(pidfd, code)}"
    return answer_of(*call(PIDFD_GETFD, pidfd, fd, 0))


def hello() -> dict[str, Any]:
    """What this process would say of itself, as far as a probe needs it."""
    life, links = process.life(), process.namespaces()
    assert life is not None
    return {
        "pid": os.getpid(),
        "claim": {
            "boot_id": process.boot_id(),
            "pid_namespace": links["pid"],
            "start_ticks": life[1],
            "user_namespace": links["user"],
            "dumpable": dumpable(),
        },
    }


class Peer:
    """A forked process that holds a memfd open and waits. ``pid`` is its number here; ``claim`` is what it says."""

    def __init__(self, prepare: Callable[[], Any] = lambda: None, *, namespace: int = 0) -> None:
        """``prepare`` runs in it first; ``namespace=NEWPID`` makes it the first process of a PID namespace."""
        reading, writing = os.pipe()
        if namespace:
            unshare(namespace)  # for children: this process's own PID namespace stays
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(reading)
                prepare()
                fd = os.memfd_create("peer")
                os.write(writing, json.dumps({**hello(), "fd": fd}).encode() + b"\n")
                signal.pause()
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = json.loads(pipe.readline())
        self.said_pid: int = said["pid"]
        self.fd: int = said["fd"]
        self.claim = Claim(**said["claim"])

    def end(self) -> None:
        """Kill and reap it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def in_child(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a forked child and return what it returned, through JSON; its failure is ours."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 - it must not run on as a second parent
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == SKIPPED:
        os._exit(SKIPPED)
    assert code == 0, f"the child ended with {code}"
    return json.loads(text)
