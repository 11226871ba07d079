"""Try ``pidfd_open`` + ``pidfd_getfd`` on a real process, and gather what tells the causes of a refusal apart.

A process number is worth nothing by itself: in another PID namespace it is nobody's or a stranger's, later it is
somebody else's, and a stranger hands out the wrong descriptor without any error. So a peer is proven by what its hello
says (machine, PID namespace, start) before anything of it is opened, and once more after.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final, Literal

import msgspec

from syncstack.facts import identity, process
from syncstack.facts.causes import Credentials, Observed, decide
from syncstack.facts.model import Cause, TargetFact
from syncstack.facts.syscalls import answer_of, call, number_of

_KCMP_FILE: Final = 0
_CHILD_S: Final = 2.0


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer says of itself, by which it is proven. Inodes as in ``Facts.namespaces``; ticks as in ``Hello``.

    ``user_namespace`` and ``dumpable`` are not needed for the proof; they tell causes apart that look alike from here.
    """

    boot_id: str
    pid_namespace: str
    start_ticks: int
    user_namespace: str = ""
    dumpable: bool | None = None


def probe_target(pid: int, fd: int, claim: Claim) -> TargetFact:
    """Try to get descriptor ``fd`` of the peer ``pid``; what was got is closed at once.

    Opens nothing unless the number is proven to be the peer's. Never raises for what the kernel or the peer does.
    """
    return decide(_look(_base("peer"), pid, fd, claim))


def probe_child() -> TargetFact:
    """Try the same on a child of our own, started for this and gone when this returns (a few milliseconds).

    No fork: the caller may have threads and a hundred gigabytes. Where the filter refuses the call, none is started.
    """
    base = _base("child")
    if base.unreached != "EBADF":
        return decide(base)
    try:
        child = _start_child()
    except OSError as error:
        text = f"no child could be started: {error.strerror}"
        return TargetFact(target="child", verdict="denied", cause="unknown", evidence=text)
    try:
        return decide(_look(base, child.pid, 0, None))
    finally:
        child.kill()
        assert child.stdin is not None
        child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # then subprocess reaps it later
            child.wait(_CHILD_S)


def _start_child() -> subprocess.Popen[bytes]:
    """Start a program that waits on its standard input. Raises OSError."""

    def start(*argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    try:
        return start("/bin/sh", "-c", "read line")
    except OSError:  # an image without a shell
        return start(sys.executable, "-ISc", "input()")


def _getfd(pidfd: int, fd: int) -> str:
    """Return the answer of pidfd_getfd; the descriptor is closed at once."""
    found, code = call(number_of("pidfd_getfd"), pidfd, fd, 0)
    if found >= 0:
        os.close(found)
    return answer_of(found, code)


def _base(target: Literal["child", "peer"]) -> Observed:
    """Return what is known without a target."""
    fields, yama = process.status(), identity.yama()
    return Observed(
        target=target,
        kernel=platform.release(),
        seccomp_mode=int(fields.get("Seccomp", "0")),
        sandbox=process.runtime().value == "gvisor",
        unreached=_getfd(-1, 0),
        kcmp_unreached=answer_of(*call(number_of("kcmp"), -1, -1, _KCMP_FILE, 0, 0)),
        mine=_credentials("self"),
        user_namespace=process.namespaces()["user"],
        remapped=identity.identity().remapped,
        yama_present=yama.present,
        yama_scope=yama.scope,
        label=identity.label(),
    )


def _credentials(pid: int | str) -> Credentials:
    fields = process.status(pid=pid)
    return Credentials(
        uids=tuple(int(word) for word in fields.get("Uid", "").split()[:3]),
        gids=tuple(int(word) for word in fields.get("Gid", "").split()[:3]),
        permitted=int(fields.get("CapPrm", "0"), 16),
        effective=int(fields.get("CapEff", "0"), 16),
    )


def _look(base: Observed, pid: int, fd: int, claim: Claim | None) -> Observed:
    """Prove the number, open it and ask; ``claim`` is None for our own child, whose number nobody else can get."""
    if base.unreached != "EBADF":
        return base
    disproof, proof = _prove(pid, claim)
    if disproof != "none":
        return msgspec.structs.replace(base, disproof=disproof, proof=proof)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        return msgspec.structs.replace(base, proof=proof, opened=answer_of(-1, error.errno or 0))
    try:
        # The number may have passed to another process before it was opened.
        disproof, proof = _prove(pid, claim)
        if disproof != "none":
            return msgspec.structs.replace(base, disproof=disproof, proof=proof)
        return _ask(msgspec.structs.replace(base, proof=proof, opened="ok"), pidfd, pid, fd, claim)
    finally:
        os.close(pidfd)


def _prove(pid: int, claim: Claim | None) -> tuple[Cause, str]:
    """Return (``none``, proof), or why ``pid`` is not known to be the process that is meant."""
    if claim is None:
        return "none", f"pid {pid} is our child"
    boot_id, here = process.boot_id(), process.namespaces()["pid"]
    for what, ours, theirs in (("boot id", boot_id, claim.boot_id), ("PID namespace", here, claim.pid_namespace)):
        if not ours or not theirs:
            return "unknown", f"pid {pid} means nothing: {what} {ours or 'unknown'} here, {theirs or 'unknown'} there"
    if claim.boot_id != boot_id:
        return "pid-namespace", f"pid {pid} is of another machine (boot id {claim.boot_id} there, {boot_id} here)"
    if claim.pid_namespace != here:
        return "pid-namespace", f"pid {pid} counts in PID namespace {claim.pid_namespace}, this process is in {here}"
    if not _own_proc():
        return "pid-namespace", f"/proc is that of another PID namespace, so pid {pid} cannot be looked up"
    found = process.life(pid)
    if found is None:
        return "target-gone", f"there is no process {pid} in /proc"
    if found[1] != claim.start_ticks:
        return "target-gone", f"pid {pid} started at tick {found[1]}, the one that is meant at {claim.start_ticks}"
    if found[0] in "ZX":
        return "target-gone", f"pid {pid} has ended (state {found[0]})"
    return "none", f"pid {pid} started at tick {found[1]}, as it said"


def _own_proc() -> bool:
    try:
        return str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return False


def _ask(base: Observed, pidfd: int, pid: int, fd: int, claim: Claim | None) -> Observed:
    try:
        Path(f"/proc/{pid}/ns/user").readlink()
        link = "ok"
    except OSError as error:
        link = answer_of(-1, error.errno or 0)
    try:
        owner: int | None = Path(f"/proc/{pid}/fd").stat().st_uid
    except OSError:
        owner = None
    return msgspec.structs.replace(
        base,
        getfd=_getfd(pidfd, fd),
        kcmp=answer_of(*call(number_of("kcmp"), os.getpid(), pid, _KCMP_FILE, 0, 0)),
        link=link,
        owner=owner,
        theirs=_credentials(pid),
        their_user_namespace=claim.user_namespace if claim else "",
        dumpable=claim.dumpable if claim else None,
        their_label=identity.label(pid),
    )
