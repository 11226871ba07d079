"""Which gate stands between a process and another one's descriptors: a pure function over what was answered.

The kernel's order: filter, call, process number, ``ptrace_may_access``, descriptor. What the answers mean:

============  ==========  ========  =================  ==============================================================
getfd(-1)     open(T)     getfd(T)  kcmp, ns/user      cause
============  ==========  ========  =================  ==============================================================
EPERM                                                  seccomp
ENOSYS                                                 sandbox, old-kernel, or seccomp that hides the call
EBADF         not tried                                pid-namespace, target-gone: the number was not proven
EBADF         ESRCH       ESRCH                        target-gone
EBADF         ok          EBADF                        bad-descriptor: everything was permitted
EBADF         ok          EPERM     ok                 yama, else another security module
EBADF         ok          EPERM     refused            user-namespace, uid, non-dumpable, capability, lsm
============  ==========  ========  =================  ==============================================================

kcmp and the link /proc/T/ns/user are the second witness: they ask ``ptrace_may_access`` for reading, which Yama leaves
alone. The credentials of both sides then say which of the rest it is.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from syncstack.facts.model import Cause, TargetFact, Verdict
from syncstack.facts.process import CAPABILITY_NAMES, capability_names

_SYS_PTRACE: Final = 1 << CAPABILITY_NAMES.index("CAP_SYS_PTRACE")
_PIDFD_OPEN_SINCE: Final = (5, 3)
_PIDFD_GETFD_SINCE: Final = (5, 6)
_DENIALS: Final = ("EPERM", "EACCES")

_Found = tuple[Cause, str] | None


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Of /proc/PID/status: real, effective and saved ids, and capabilities as bits. Empty ids: it could not be read."""

    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    permitted: int = 0
    effective: int = 0


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What was answered. An answer is ``ok``, the name of an errno, or "" where nothing was asked.

    ``unreached`` and ``kcmp_unreached`` are the answers to arguments without a target. ``disproof`` is ``none`` once
    the number T is proven to be the process that is meant, else why it is not; then nothing was opened. ``owner`` is
    the uid that owns /proc/T/fd; ``dumpable`` what T says of itself; user namespaces are inodes, "" where unknown.
    """

    target: Literal["child", "peer"]
    kernel: str
    seccomp_mode: int = 0
    sandbox: bool = False
    unreached: str = "EBADF"
    disproof: Cause = "none"
    proof: str = ""
    opened: str = ""
    getfd: str = ""
    kcmp_unreached: str = ""
    kcmp: str = ""
    link: str = ""
    mine: Credentials = Credentials()
    theirs: Credentials = Credentials()
    user_namespace: str = ""
    their_user_namespace: str = ""
    remapped: bool = False
    owner: int | None = None
    dumpable: bool | None = None
    yama_present: bool = False
    yama_scope: int | None = None
    label: str = ""
    their_label: str = ""

    @property
    def readable(self) -> bool | None:
        """Whether T may be looked into for reading; None where no witness answered.

        kcmp asks with the same ids as pidfd_getfd, but a filter may stand before it; the link is read in any case.
        """
        answer = self.kcmp if self.kcmp and self.kcmp_unreached not in (*_DENIALS, "ENOSYS") else self.link
        return True if answer == "ok" else False if answer in _DENIALS else None


def decide(seen: Observed) -> TargetFact:
    """Return the verdict and the one gate that explains every answer."""
    cause, why = _filtered(seen) or _unproven(seen) or _opened(seen) or _answered(seen)
    verdict: Verdict = "denied"
    if cause == "none":
        verdict = "ok"
    elif cause in ("pid-namespace", "target-gone", "bad-descriptor") or "ENOSYS" in (
        seen.unreached,
        seen.opened,
        seen.getfd,
    ):
        verdict = "absent"
    return TargetFact(target=seen.target, verdict=verdict, cause=cause, evidence=f"{why}: {_shown(seen)}")


def _filtered(seen: Observed) -> _Found:
    if seen.unreached == "ENOSYS":
        return _absent(seen, _PIDFD_GETFD_SINCE)
    return _refused_at_once(seen, "pidfd_getfd") if seen.unreached in _DENIALS else None


def _absent(seen: Observed, since: tuple[int, int]) -> tuple[Cause, str]:
    """ENOSYS means "not there": who says so?"""
    if seen.sandbox:
        return "sandbox", "the sandbox lacks the call"
    if _version(seen.kernel) < since:
        return "old-kernel", f"kernel {seen.kernel} lacks the call, which came with {since[0]}.{since[1]}"
    if seen.seccomp_mode:
        return "seccomp", "a filter hides the call"
    return "sandbox", f"no filter is loaded, and what claims to be kernel {seen.kernel} lacks the call"


def _refused_at_once(seen: Observed, name: str) -> tuple[Cause, str]:
    if seen.sandbox or seen.seccomp_mode:
        return ("seccomp" if seen.seccomp_mode else "sandbox"), f"{name} is refused before it looks at anything"
    return "unknown", f"{name} is refused before it looks at anything, and no filter is loaded"


def _version(release: str) -> tuple[int, int]:
    parts = [part for part in release.replace("-", ".").split(".")[:2] if part.isdigit()]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 else (99, 0)


def _unproven(seen: Observed) -> _Found:
    return None if seen.disproof == "none" else (seen.disproof, "it was not opened")


def _opened(seen: Observed) -> _Found:
    if seen.opened == "ok":
        return None
    if seen.opened == "ENOSYS":
        return _absent(seen, _PIDFD_OPEN_SINCE)
    if seen.opened == "ESRCH":
        return "target-gone", "it has ended"
    # The kernel asks for no permission here.
    return _refused_at_once(seen, "pidfd_open") if seen.opened in _DENIALS else ("unknown", "it could not be opened")


def _answered(seen: Observed) -> tuple[Cause, str]:
    simple: dict[str, tuple[Cause, str]] = {
        "ok": ("none", "its descriptor was had"),
        "EBADF": ("bad-descriptor", "the call is permitted; it has no such descriptor"),
        "ESRCH": ("target-gone", "it has ended"),
        "EACCES": ("lsm", "the kernel's own rule answers EPERM, never EACCES: a security module refused the file"),
    }
    if seen.getfd in simple:
        return simple[seen.getfd]
    if seen.getfd == "ENOSYS":
        return _absent(seen, _PIDFD_GETFD_SINCE)
    if seen.getfd != "EPERM":
        return "unknown", "the answer names no gate"
    if seen.readable is None:
        return "unknown", "EPERM, and no second witness could be asked"
    return _attach_only(seen) if seen.readable else _credentials(seen)


def _traces(seen: Observed) -> bool:
    return bool(seen.mine.effective & _SYS_PTRACE)


def _other_ids(seen: Observed) -> str:
    """Return how the caller's real ids differ from any of the target's, "" if they do not."""
    for kind, mine, theirs in (("uid", seen.mine.uids, seen.theirs.uids), ("gid", seen.mine.gids, seen.theirs.gids)):
        if mine and theirs and set(theirs) != {mine[0]}:
            return f"{kind} {mine[0]} here, {', '.join(map(str, theirs))} there, and no CAP_SYS_PTRACE"
    return ""


def _attach_only(seen: Observed) -> tuple[Cause, str]:
    """It may be read but not attached to: of all gates only a security module tells these apart."""
    different = _other_ids(seen)
    if different and not _traces(seen):  # a setuid program: the link is read with the effective ids
        return "uid", different
    shown = "unreadable" if seen.yama_scope is None else str(seen.yama_scope)
    if seen.yama_present and seen.yama_scope != 0 and not (seen.yama_scope in (1, 2) and _traces(seen)):
        return "yama", f"it may be read but not attached to, and kernel.yama.ptrace_scope is {shown}"
    return "lsm", "it may be read but not attached to, and not because of Yama"


def _credentials(seen: Observed) -> tuple[Cause, str]:
    ours, others = seen.user_namespace, seen.their_user_namespace
    if ours and others and ours != others:
        return "user-namespace", f"user namespace {ours} here, {others} there"
    if _traces(seen):
        if seen.remapped and not others:
            return "user-namespace", "CAP_SYS_PTRACE counts in this user namespace only, and the target's is unknown"
        return "lsm", "CAP_SYS_PTRACE would open every other gate"
    different = _other_ids(seen)
    if different:
        return "uid", different
    return _same_ids(seen)


def _same_ids(seen: Observed) -> tuple[Cause, str]:
    uid = seen.theirs.uids[1] if len(seen.theirs.uids) > 1 else None
    if seen.dumpable is False:
        return "non-dumpable", "it says that it is not dumpable"
    if uid and seen.owner == 0:
        return "non-dumpable", f"its user is {uid}, but /proc shows root as the owner of its descriptors"
    more = seen.theirs.permitted & ~seen.mine.permitted
    if more:
        return "capability", f"it has capabilities that are missing here ({', '.join(capability_names(more))})"
    if seen.dumpable or (uid and seen.owner == uid):
        return "lsm", "same ids, dumpable, and no capability is missing"
    if uid is None:
        return "unknown", "its ids could not be read"
    if any(label not in ("", "unconfined") for label in (seen.label, seen.their_label)):
        return "lsm", f"security label {seen.label or 'none'} here, {seen.their_label or 'unknown'} there"
    return "non-dumpable", "same ids, no capability is missing and no security label in sight; root leaves no sign"


def _shown(seen: Observed) -> str:
    """Return the answers that were got, in the order of asking."""
    parts = [f"pidfd_getfd(-1, 0, 0) = {seen.unreached}", seen.proof]
    for what, answer in (
        ("pidfd_open", seen.opened),
        ("pidfd_getfd", seen.getfd),
        ("kcmp", seen.kcmp),
        ("/proc/T/ns/user", seen.link),
    ):
        if answer:
            parts.append(f"{what} = {answer}")
    return ", ".join(part for part in parts if part)
