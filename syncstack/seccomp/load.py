"""Find a profile by name or file, and make it flat the way a container runtime does.

Docker's conditions (``includes``, ``excludes``, ``archMap``, ``minKernel``) are decided for given capabilities, as the
Docker daemon does it: against the *bounding* set that the process will have. containerd knows none of them.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from syncstack.errors import ProfileError
from syncstack.seccomp import builtin
from syncstack.seccomp.generate import render
from syncstack.seccomp.profile import Condition, Profile, Rule, parse
from syncstack.seccomp.table import EPERM, PROFILES

Runtime = Literal["docker", "docker-20.10", "containerd"]
RUNTIMES: Final[tuple[Runtime, ...]] = ("docker", "docker-20.10", "containerd")
ENGINES: Final = ("docker", "containerd")
NAMES: Final = (*PROFILES, "docker", "docker@VERSION", "containerd")

# The capabilities that Docker gives a container by default.
_DOCKER = """
    AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID SETPCAP SETUID
    SYS_CHROOT"""
DOCKER_CAPABILITIES = tuple(f"CAP_{name}" for name in _DOCKER.split())

# platform.machine() -> (OCI architecture, the name in Docker's "arches").
_MACHINES = {"x86_64": ("SCMP_ARCH_X86_64", "amd64"), "aarch64": ("SCMP_ARCH_AARCH64", "arm64")}


def _kernel(text: str) -> tuple[int, int]:
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    try:
        return int(major), int(minor)
    except ValueError:
        raise ProfileError("not a kernel version", observed=repr(text), expected='minKernel "major.minor"') from None


def _holds(condition: Condition, caps: frozenset[str], arch: str, kernel: tuple[int, int]) -> tuple[bool, ...]:
    """Return, for each part of ``condition`` that is set, whether it holds. Any one excludes; all must include."""
    parts = []
    if condition.arches:
        parts.append(arch in condition.arches)
    if condition.min_kernel:
        parts.append(kernel >= _kernel(condition.min_kernel))
    parts.extend(cap in caps for cap in condition.caps)
    return tuple(parts)


def _machine() -> tuple[str, str]:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise ProfileError("no seccomp names for this machine", observed=machine, expected=", ".join(_MACHINES))
    return _MACHINES[machine]


def _architectures(profile: Profile, native: str, runtime: Runtime) -> tuple[str, ...]:
    if profile.arch_map is not None and runtime != "containerd":
        subs = [entry.sub_architectures or () for entry in profile.arch_map if entry.architecture == native]
        return (native, *(name for names in subs for name in names))
    return profile.architectures or (native,)


def resolve(profile: Profile, *, caps: Sequence[str], kernel: str = "", runtime: Runtime = "docker") -> Profile:
    """Return ``profile`` flat: what ``runtime`` makes of it for ``caps`` (bounding set), ``kernel`` and this machine.

    ``docker`` decides the conditions, for this kernel unless told; ``docker-20.10`` reads no ``defaultErrnoRet`` and no
    ``flags`` besides; ``containerd`` takes every rule as unconditional, and one by the old ``name`` for none.
    """
    native, arch = _machine()
    version = _kernel(kernel or platform.release())
    nothing, holds = Condition(), frozenset(caps)
    rules = []
    for rule in profile.syscalls:
        if runtime != "containerd":
            if not all(_holds(rule.includes or nothing, holds, arch, version)):
                continue
            if any(_holds(rule.excludes or nothing, holds, arch, version)):
                continue
        names = rule.names or ((rule.name,) if runtime != "containerd" else ())
        rules.append(Rule(action=rule.action, names=names, errno_ret=rule.errno_ret, args=rule.args))
    return Profile(
        default_action=profile.default_action,
        default_errno_ret=EPERM if runtime == "docker-20.10" else profile.default_errno_ret,
        architectures=_architectures(profile, native, runtime),
        flags=() if runtime == "docker-20.10" else profile.flags,
        syscalls=tuple(rules),
    )


def read(path: str) -> bytes:
    """Return the bytes of a profile's file; ``ProfileError`` says that ``path`` is neither a file nor a name."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ProfileError(
            f"no seccomp profile {path!r}",
            observed=error.strerror,
            expected=f"a file, or one of {', '.join(NAMES)}",
        ) from None


def document(name: str) -> bytes | None:
    """Return a profile that is known by name as JSON (ours, Docker's built-in, containerd's), or None."""
    for profile in PROFILES:
        if name == profile:
            return render(profile)
    engine, at, version = name.partition("@")
    if engine == "docker":
        return msgspec.json.encode(builtin.docker(version if at else None))
    return msgspec.json.encode(builtin.containerd()) if name == "containerd" else None


def load(profile: str, *, caps: Sequence[str] = (), kernel: str = "", runtime: Runtime = "docker") -> Profile:
    """Return the flat profile of that name (see ``NAMES``), or the one in the file ``profile``."""
    data = document(profile)
    found = parse(read(profile) if data is None else data, origin=profile)
    return resolve(found, caps=caps, kernel=kernel, runtime=runtime)
