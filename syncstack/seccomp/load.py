"""Read a seccomp profile, flat OCI or Docker's format, into one flat form.

Docker's conditions (``includes``, ``excludes``, ``archMap``, ``minKernel``) are resolved here for given capabilities,
the way the Docker daemon does it: against the *bounding* set that the process will have.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncstack.errors import ProfileError
from syncstack.seccomp.generate import render
from syncstack.seccomp.table import EPERM, PROFILES

# The capabilities that Docker gives a container by default.
_DOCKER = """
    AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID SETPCAP SETUID
    SYS_CHROOT"""
DOCKER_CAPABILITIES = tuple(f"CAP_{name}" for name in _DOCKER.split())

# platform.machine() -> (OCI architecture, the name in Docker's "arches").
_MACHINES = {"x86_64": ("SCMP_ARCH_X86_64", "amd64"), "aarch64": ("SCMP_ARCH_AARCH64", "arm64")}


class Arg(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A condition on one register argument."""

    index: int
    value: int
    op: str
    value_two: int = 0


class _Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    caps: tuple[str, ...] = ()
    arches: tuple[str, ...] = ()
    min_kernel: str = ""


class Rule(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """An action for some system calls, all ``args`` holding. ``name`` and the conditions are Docker's."""

    action: str
    names: tuple[str, ...] = ()
    name: str = ""
    errno_ret: int | None = None
    args: tuple[Arg, ...] | None = None
    comment: str = ""
    includes: _Condition | None = None
    excludes: _Condition | None = None


class _ArchMap(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    architecture: str
    sub_architectures: tuple[str, ...] | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A profile; after :func:`resolve` it has no ``arch_map`` and no rule has a condition."""

    default_action: str
    default_errno_ret: int = EPERM
    architectures: tuple[str, ...] | None = None
    arch_map: tuple[_ArchMap, ...] | None = None
    flags: tuple[str, ...] = ()
    syscalls: tuple[Rule, ...] = ()


def _kernel(text: str) -> tuple[int, int]:
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    try:
        return int(major), int(minor)
    except ValueError:
        raise ProfileError("minKernel is not a version", observed=repr(text), expected='"major.minor"') from None


def _applies(rule: Rule, caps: frozenset[str], arch: str, kernel: tuple[int, int]) -> bool:
    yes, no = rule.includes, rule.excludes
    if yes is not None:
        if yes.arches and arch not in yes.arches:
            return False
        if not caps.issuperset(yes.caps):
            return False
        if yes.min_kernel and kernel < _kernel(yes.min_kernel):
            return False
    if no is not None:
        if arch in no.arches or caps.intersection(no.caps):
            return False
        if no.min_kernel and kernel >= _kernel(no.min_kernel):
            return False
    return True


def _machine() -> tuple[str, str]:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise ProfileError("no seccomp names for this machine", observed=machine, expected=", ".join(_MACHINES))
    return _MACHINES[machine]


def _architectures(profile: Profile, native: str) -> tuple[str, ...]:
    if profile.arch_map is not None:
        if profile.architectures is not None:
            raise ProfileError("a profile has either architectures or archMap", observed="both")
        subs = [entry.sub_architectures or () for entry in profile.arch_map if entry.architecture == native]
        return (native, *(name for names in subs for name in names))
    return profile.architectures or (native,)


def resolve(profile: Profile, *, caps: Sequence[str]) -> Profile:
    """Return ``profile`` flat: conditions decided for ``caps`` (bounding set), this machine and this kernel."""
    native, arch = _machine()
    kernel = _kernel(platform.release())
    rules = []
    for rule in profile.syscalls:
        if bool(rule.name) == bool(rule.names):
            raise ProfileError("a rule needs either name or names", observed=f"name={rule.name!r} names={rule.names!r}")
        if _applies(rule, frozenset(caps), arch, kernel):
            names = rule.names or (rule.name,)
            rules.append(Rule(action=rule.action, names=names, errno_ret=rule.errno_ret, args=rule.args))
    return Profile(
        default_action=profile.default_action,
        default_errno_ret=profile.default_errno_ret,
        architectures=_architectures(profile, native),
        flags=profile.flags,
        syscalls=tuple(rules),
    )


def parse(data: bytes, *, origin: str) -> Profile:
    """Return the profile in ``data`` as it is written; ``ProfileError`` names ``origin`` and the field."""
    try:
        return msgspec.json.decode(data, type=Profile)
    except msgspec.DecodeError as error:  # ValidationError is one of them
        raise ProfileError(f"{origin} is not a seccomp profile", observed=str(error)) from None


def load(profile: str, *, caps: Sequence[str] = ()) -> Profile:
    """Return the flat profile named ``permissive`` or ``restrictive``, or the one in the file ``profile``."""
    for name in PROFILES:
        if profile == name:
            return resolve(parse(render(name), origin=name), caps=caps)
    try:
        data = Path(profile).read_bytes()
    except OSError as error:
        raise ProfileError(
            f"no seccomp profile {profile!r}",
            observed=error.strerror,
            expected=f"a file, or one of {', '.join(PROFILES)}",
        ) from None
    return resolve(parse(data, origin=profile), caps=caps)
