"""What the engines apply when no profile is given: Docker's built-in profile, by release, and containerd's.

A model, not a copy: our table is upstream's profile for a process without capabilities, and here is what upstream adds
to it under a condition, what containerd does otherwise, and what older Docker releases did. 64-bit calls only: Docker
lets 32-bit programs run, this model ends them. The tests compare it with the filter of a real container, call by call.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from syncstack.errors import UsageError
from syncstack.seccomp.profile import Arg, Condition, Profile, Rule
from syncstack.seccomp.table import (
    ENOSYS,
    HIGHEST_FAMILY,
    NAMESPACE_FLAGS,
    PERSONALITIES,
    REFUSED_FAMILIES,
    ROWS,
    Answer,
)

Release = tuple[int, int, int]

ALWAYS: Final = "always"
KERNEL_4_8: Final = "kernel >= 4.8"
NEVER: Final[tuple[str, ...]] = ()

_ADMIN: Final = "CAP_SYS_ADMIN"
# Condition -> the calls that upstream allows under it. A call can have several.
_GRANTS: Final[Mapping[str, str]] = {
    ALWAYS: "pidfd_open pidfd_send_signal process_mrelease",
    KERNEL_4_8: "process_vm_readv process_vm_writev ptrace",
    "CAP_BPF": "bpf",
    "CAP_DAC_READ_SEARCH": "open_by_handle_at",
    "CAP_PERFMON": "perf_event_open",
    _ADMIN: """bpf clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie lsm_get_self_attr lsm_list_modules
        lsm_set_self_attr mount mount_setattr move_mount open_tree perf_event_open quotactl quotactl_fd setdomainname
        sethostname setns syslog umount2 unshare""",
    "CAP_SYS_BOOT": "reboot",
    "CAP_SYS_CHROOT": "chroot",
    "CAP_SYS_MODULE": "delete_module finit_module init_module",
    "CAP_SYS_NICE": "get_mempolicy mbind set_mempolicy set_mempolicy_home_node",
    "CAP_SYS_PACCT": "acct",
    "CAP_SYS_PTRACE": "kcmp pidfd_getfd process_madvise process_vm_readv process_vm_writev ptrace",
    "CAP_SYS_RAWIO": "ioperm iopl",
    "CAP_SYS_TIME": "clock_settime settimeofday",
    "CAP_SYS_TTY_CONFIG": "vhangup",
    "CAP_SYSLOG": "syslog",
}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of Docker's profile: the release it came with (one for each branch that got it), and the state before.

    ``before`` are the conditions under which ``names`` were allowed until then: none, ALWAYS, or capabilities.
    """

    since: tuple[Release, ...]
    names: tuple[str, ...]
    before: tuple[str, ...]

    def reached(self, engine: Release) -> bool:
        """Return whether ``engine`` has the change: it is the newest branch's release or later, or in a branch."""
        return engine >= max(self.since) or any(engine[0] == since[0] and engine >= since for since in self.since)


def _change(since: str, names: str, before: tuple[str, ...]) -> Change:
    return Change(since=tuple(map(release, since.split())), names=tuple(names.split()), before=before)


def release(text: str) -> Release:
    """Return (major, minor, patch) of a Docker version such as 20.10.24+dfsg1; of 20.10 the last patch of its branch.

    ``UsageError`` for another text.
    """
    parts = text.split("+")[0].split("-")[0].split(".")
    if not 2 <= len(parts) <= 3 or not all(part.isdigit() for part in parts):
        raise UsageError("not a Docker version", observed=repr(text), expected="such as 20.10.24")
    numbers = [int(part) for part in parts]
    return numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else 9999


def changes() -> tuple[Change, ...]:
    """Return how Docker's profile came to what it is, newest first."""
    return (
        _change("28.2.0", """getxattrat listmount listxattrat mseal removexattrat setxattrat statmount uretprobe
                lsm_get_self_attr lsm_list_modules lsm_set_self_attr""", NEVER),
        _change("23.0.10 25.0.3", "cachestat fchmodat2 futex_requeue futex_wait futex_wake map_shadow_stack", NEVER),
        _change("25.0.0", "io_uring_enter io_uring_register io_uring_setup", (ALWAYS,)),
        _change("20.10.26 23.0.7 24.0.3", "name_to_handle_at", (_ADMIN,)),
        _change("23.0.0", "pkey_alloc pkey_free pkey_mprotect set_mempolicy_home_node", NEVER),
        _change("23.0.0", "process_vm_readv process_vm_writev", ("CAP_SYS_PTRACE",)),
        _change("23.0.0", "bpf perf_event_open", (_ADMIN,)),
    )  # fmt: skip


OLDEST: Final[Release] = (20, 10, 18)
_NO_ALG: Final[Release] = (29, 4, 2)
_NO_VSOCK: Final[Release] = (23, 0, 0)
_AF_ALG, _AF_VSOCK = 38, 40


def _conditions() -> dict[str, tuple[str, ...]]:
    """Return call -> the conditions under which the newest Docker allows it."""
    found: dict[str, tuple[str, ...]] = {}
    for row in ROWS:
        if row.permissive is row.restrictive is Answer.ALLOW:
            found |= dict.fromkeys(row.names, (ALWAYS,))
    for condition, names in _GRANTS.items():
        for name in names.split():
            found[name] = (*found.get(name, ()), condition)
    return found


def _rule(condition: str, names: tuple[str, ...]) -> Rule:
    if condition == ALWAYS:
        includes = None
    else:
        includes = Condition(min_kernel="4.8") if condition == KERNEL_4_8 else Condition(caps=(condition,))
    return Rule(names=names, action="SCMP_ACT_ALLOW", includes=includes)


def _arg(name: str, value: int, op: str = "SCMP_CMP_EQ", excludes: Condition | None = None) -> Rule:
    return Rule(names=(name,), action="SCMP_ACT_ALLOW", args=(Arg(index=0, value=value, op=op),), excludes=excludes)


def _socket_rules(families: tuple[int, ...]) -> Iterator[Rule]:
    """Yield the rules on a socket's address family. Only the newest Docker lists what it allows."""
    if not families:
        yield Rule(names=("socket",), action="SCMP_ACT_ALLOW")
        return
    by_list = families == REFUSED_FAMILIES
    first, last = (0, HIGHEST_FAMILY) if by_list else (min(families), max(families))
    for family in range(first, last + 1):
        if family not in families:
            yield _arg("socket", family)
    if not by_list:
        yield _arg("socket", first, "SCMP_CMP_LT")
        yield _arg("socket", last, "SCMP_CMP_GT")


def _argument_rules(families: tuple[int, ...]) -> Iterator[Rule]:
    """Yield the rules on arguments. ``families`` are the address families that a socket must not have."""
    admin = Condition(caps=(_ADMIN,))
    yield Rule(names=("clone",), action="SCMP_ACT_ALLOW", includes=admin)
    yield _arg("clone", sum(NAMESPACE_FLAGS), "SCMP_CMP_MASKED_EQ", excludes=admin)
    yield Rule(names=("clone3",), action="SCMP_ACT_ERRNO", errno_ret=ENOSYS, excludes=admin)
    for value in PERSONALITIES:
        yield _arg("personality", value)
    yield from _socket_rules(families)


def _profile(conditions: Mapping[str, tuple[str, ...]], families: tuple[int, ...]) -> Profile:
    by_condition: dict[str, list[str]] = {}
    for name, allowed in sorted(conditions.items()):
        for condition in allowed:
            by_condition.setdefault(condition, []).append(name)
    rules = [_rule(condition, tuple(names)) for condition, names in by_condition.items()]
    return Profile(
        default_action="SCMP_ACT_ERRNO",
        architectures=({"x86_64": "SCMP_ARCH_X86_64"}.get(platform.machine(), "SCMP_ARCH_AARCH64"),),
        syscalls=(*rules, *_argument_rules(families)),
    )


def docker(version: str | None = None) -> Profile:
    """Return Docker's built-in profile, in Docker's format: of the engine ``version``, or the newest (29).

    ``UsageError`` for engines before 20.10.18.
    """
    conditions = _conditions()
    families: tuple[int, ...] = REFUSED_FAMILIES
    if version is None:
        return _profile(conditions, families)
    engine = release(version)
    if engine < OLDEST:
        raise UsageError("no table for this Docker engine", observed=version, expected="20.10.18 or newer")
    for change in changes():
        if not change.reached(engine):
            conditions |= dict.fromkeys(change.names, change.before)
    if engine < _NO_ALG:
        families = () if engine < _NO_VSOCK else (_AF_VSOCK,)
    return _profile(conditions, families)


def _containerd_conditions() -> dict[str, tuple[str, ...]]:
    return _conditions() | dict.fromkeys(("lsm_get_self_attr", "lsm_list_modules"), (ALWAYS,))


def containerd() -> Profile:
    """Return containerd's RuntimeDefault (2.3), which it makes for each container out of its bounding set."""
    return _profile(_containerd_conditions(), (_AF_ALG, _AF_VSOCK))


def history(name: str) -> tuple[str, ...]:
    """Return what older Docker releases did with a call, in words, newest first."""
    lines = []
    for change in changes():
        if name in change.names:
            releases = ", ".join(".".join(map(str, since)) for since in change.since)
            before = "refused" if change.before == NEVER else f"allowed with {' or '.join(change.before)}"
            lines.append(f"before {releases}: {'allowed' if ALWAYS in change.before else before}")
    return tuple(lines)


def granted_with(name: str, engine: str) -> tuple[str, ...]:
    """Return under which conditions the newest ``docker`` or ``containerd`` allows a call, beside always."""
    found = _conditions().get(name, NEVER) if engine == "docker" else _containerd_conditions().get(name, NEVER)
    return tuple(condition for condition in found if condition != ALWAYS)
