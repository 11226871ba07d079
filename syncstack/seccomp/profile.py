"""A seccomp profile as it is written: flat OCI, or Docker's format with its conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from syncstack.errors import ProfileError
from syncstack.seccomp.table import EPERM


class Arg(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A condition on one register argument."""

    index: int
    value: int
    op: str
    value_two: int = 0


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Docker's ``includes`` and ``excludes``: capabilities, architectures (Go's names) and a kernel "major.minor"."""

    caps: tuple[str, ...] = ()
    arches: tuple[str, ...] = ()
    min_kernel: str = ""


class Rule(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An action for some system calls, all ``args`` holding. ``name`` and the conditions are Docker's.

    ``errno`` (a name) is read by Podman and CRI-O alone, beside ``errno_ret``.
    """

    action: str
    names: tuple[str, ...] = ()
    name: str = ""
    errno_ret: int | None = None
    errno: str = ""
    args: tuple[Arg, ...] | None = None
    comment: str = ""
    includes: Condition | None = None
    excludes: Condition | None = None


class ArchMap(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Docker's list of what belongs to a native architecture."""

    architecture: str
    sub_architectures: tuple[str, ...] | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A profile; once resolved it has no ``arch_map`` and no rule has a condition."""

    default_action: str
    default_errno_ret: int = EPERM
    default_errno: str = ""
    architectures: tuple[str, ...] | None = None
    arch_map: tuple[ArchMap, ...] | None = None
    flags: tuple[str, ...] = ()
    listener_path: str = ""
    listener_metadata: str = ""
    syscalls: tuple[Rule, ...] = ()


# Where structures lie in a profile: key -> what its value, or each entry of its list, is.
_INSIDE: Final[Mapping[type[msgspec.Struct], Mapping[str, type[msgspec.Struct]]]] = {
    Profile: {"syscalls": Rule, "archMap": ArchMap},
    Rule: {"args": Arg, "includes": Condition, "excludes": Condition},
}


def _unknown(value: Any, kind: type[msgspec.Struct], path: str) -> Iterator[str]:
    for key, inner in value.items():
        if key not in kind.__struct_encode_fields__:
            yield f"{path}{key}"
        elif key in _INSIDE.get(kind, {}):
            for index, entry in enumerate(inner if isinstance(inner, list) else [inner]):
                where = f"{path}{key}[{index}]." if isinstance(inner, list) else f"{path}{key}."
                yield from _unknown(entry or {}, _INSIDE[kind][key], where)


def unknown_fields(data: bytes) -> tuple[str, ...]:
    """Return the fields of a profile that no runtime reads, such as ``syscalls[3].include`` (a typo).

    ``data`` has been parsed by :func:`parse` before.
    """
    return tuple(_unknown(msgspec.json.decode(data), Profile, ""))


def parse(data: bytes, *, origin: str, strict: bool = True) -> Profile:
    """Return the profile in ``data`` as it is written; ``ProfileError`` names ``origin`` and the field.

    A field that no runtime reads is an error too, unless ``strict`` is False: every runtime passes over it in silence.
    """
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise ProfileError(f"{origin} is not a seccomp profile", observed=str(error)) from None
    for rule in profile.syscalls:
        if bool(rule.name) == bool(rule.names):
            raise ProfileError("a rule needs either name or names", observed=f"name={rule.name!r} names={rule.names!r}")
    if profile.arch_map is not None and profile.architectures is not None:
        raise ProfileError("a profile has either architectures or archMap", observed="both")
    unknown = unknown_fields(data) if strict else ()
    if unknown:
        raise ProfileError(f"{origin} is not a seccomp profile", observed=f"unknown field {', '.join(unknown)}")
    return profile
