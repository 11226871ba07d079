"""Compare two profiles by what they answer, not by how they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from syncstack.seccomp import libseccomp
from syncstack.seccomp.compile import UNKNOWN, Reader, samples
from syncstack.seccomp.load import load
from syncstack.seccomp.table import ARG_NOTES, ROWS

# Numbers that are looked up: past the newest call.
_NUMBERS: Final = range(600)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One call (with the arguments by which it differs, if it depends on them) and the two answers."""

    call: str
    args: str
    first: str
    second: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``same`` counts the calls that both profiles answer alike."""

    first: str
    second: str
    caps: tuple[str, ...]
    kernel: str
    same: int
    differences: tuple[Difference, ...]


def _shown(args: Sequence[tuple[int, ...]]) -> str:
    """Return argument lists for people; runs of one number after the other are drawn together."""
    if any(len(values) != 1 for values in args):
        more = f" and {len(args) - 1} more" if len(args) > 1 else ""
        return ", ".join(map(_number, args[0])) + more
    runs: list[list[int]] = []
    for (value,) in args:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts = [_number(run[0]) if len(run) == 1 else f"{_number(run[0])}-{_number(run[-1])}" for run in runs]
    return ", ".join(texts)


def _number(value: int) -> str:
    return str(value) if value < 4096 else hex(value)


def _of(name: str, first: Reader, second: Reader) -> Iterator[Difference]:
    """Yield how the answers to one call differ: one row for each pair of answers."""
    groups: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for args in samples(name, (first, second)):
        one, other = (" or ".join(sorted(reader.answers(name, args))) for reader in (first, second))
        if one != other:
            groups.setdefault((one, other), []).append(args)
    for (one, other), found in groups.items():
        yield Difference(call=name, args=_shown(found), first=one, second=other)


def _calls(readers: Sequence[Reader]) -> list[str]:
    """Return every call of this machine that libseccomp, our table or a profile names."""
    names = {libseccomp.name_of(number, libseccomp.native()) for number in _NUMBERS} - {None}
    given = {name for reader in readers for rule in reader.profile.syscalls for name in rule.names}
    given |= {name for row in ROWS for name in row.names} | set(ARG_NOTES)
    here = {name for name in given if (number := libseccomp.number_of(name)) is None or number >= 0}
    return sorted(here | {name for name in names if name is not None})


def compare(first: str, second: str, *, caps: Sequence[str], kernel: str = "") -> Comparison:
    """Return where two profiles (names or files) differ for ``caps`` and ``kernel``.

    Numbers that belong to no call are compared as well, as one: what a program sees of calls that are newer.
    """
    one, other = (Reader(load(name, caps=caps, kernel=kernel)) for name in (first, second))
    calls = _calls((one, other))
    differences = [difference for name in calls for difference in _of(name, one, other)]
    unknown = one.of_number(UNKNOWN), other.of_number(UNKNOWN)
    if unknown[0] != unknown[1]:
        differences.append(Difference(call="(unknown numbers)", args="", first=unknown[0], second=unknown[1]))
    return Comparison(
        first=first,
        second=second,
        caps=tuple(caps),
        kernel=kernel,
        same=len(calls) - len({difference.call for difference in differences} & set(calls)),
        differences=tuple(differences),
    )
