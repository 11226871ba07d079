"""What each probed system call must answer under each profile: the one table of all profile tests.

The process tests apply a profile with ``syncstack seccomp run``; the container tests run ``python -m syncstack.facts``
in containers with all capabilities dropped. The words are the verdicts of ``syncstack.facts``: ``ok`` the kernel was
reached, ``denied`` EPERM, ``absent`` ENOSYS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from syncstack.errors import UsageError

_NAMES: Final = (
    "pidfd_open", "pidfd_getfd", "memfd_create", "kcmp", "ptrace", "process_vm_readv", "unshare", "mount", "bpf",
    "userfaultfd", "io_uring_setup", "keyctl", "clone3", "get_mempolicy", "set_mempolicy", "mbind",
)  # fmt: skip


def _row(*, ok: str, absent: str = "") -> Mapping[str, str]:
    """Return a row: calls of ``ok`` and ``absent`` as said, all others denied."""
    words = dict.fromkeys(ok.split(), "ok") | dict.fromkeys(absent.split(), "absent")
    return {name: words.get(name, "denied") for name in _NAMES}


PERMISSIVE: Final = _row(
    ok="pidfd_open pidfd_getfd memfd_create kcmp ptrace process_vm_readv get_mempolicy set_mempolicy mbind",
    absent="clone3",
)
RESTRICTIVE: Final = _row(ok="memfd_create", absent="clone3")
# No filter: the kernel's own answer. An old kernel (< 6.4) refuses bpf by itself, where unprivileged bpf is off.
UNCONFINED: Final = _row(ok=" ".join(_NAMES))

# Docker's built-in profile, by engine release: (major, minor) of the first release with this row, newest first.
_DOCKER_DEFAULT: Final = (
    # 25.0 stopped allowing io_uring.
    ((25, 0), _row(ok="pidfd_open memfd_create ptrace process_vm_readv", absent="clone3")),
    # 23.0 allows process_vm_readv and process_vm_writev to all.
    ((23, 0), _row(ok="pidfd_open memfd_create ptrace process_vm_readv io_uring_setup", absent="clone3")),
    # 20.10.10 and later; process_vm_readv needs CAP_SYS_PTRACE.
    ((20, 10), _row(ok="pidfd_open memfd_create ptrace io_uring_setup", absent="clone3")),
)


def _docker_default(engine: str) -> Mapping[str, str]:
    major, _, rest = engine.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdigit() and minor.isdigit()):
        raise UsageError("not a Docker engine version", observed=repr(engine), expected="such as 20.10.24")
    for first, row in _DOCKER_DEFAULT:
        if (int(major), int(minor)) >= first:
            return row
    raise UsageError("no row for this Docker engine", observed=engine, expected="20.10 or newer")


def expected(profile: str, *, engine: str = "") -> Mapping[str, str]:
    """Return verdict by system call for ``permissive``, ``restrictive``, ``docker-default`` or ``unconfined``.

    ``engine`` is the Docker engine's version; only ``docker-default`` needs it.
    """
    if profile == "docker-default":
        return _docker_default(engine)
    rows = {"permissive": PERMISSIVE, "restrictive": RESTRICTIVE, "unconfined": UNCONFINED}
    if profile not in rows:
        raise UsageError("unknown profile", observed=profile, expected=", ".join([*rows, "docker-default"]))
    return rows[profile]
