"""Compile a flat profile into the program that runc would load, and say what it answers.

Names become numbers by libseccomp, as in runc; in front comes runc's stub for numbers that the profile cannot know.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from syncstack.seccomp import bpf, libseccomp, stub
from syncstack.seccomp.profile import Arg, Profile, Rule
from syncstack.seccomp.table import EPERM

_Args = tuple[tuple[int, str, int, int], ...]

# Actions after which the call still happens: under such a default runc prepends no stub.
_PASSING: Final = ("SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE")
# Answers after which the call happens.
REACHED: Final = frozenset({"allow", "log"})
# A number that no kernel has: what a program sees of calls that are newer than the profile.
UNKNOWN: Final = 9999
_WORD64: Final = (1 << 64) - 1
_COMBINATIONS: Final = 4096


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A program, and what came of the names that this libseccomp does not know, split by what that means.

    ``skipped`` answer the default now (harmless). ``not_denied`` were to be refused under a default that allows: they
    are open. ``highest`` is the largest number that the profile names, -1 for none.
    """

    code: bytes
    skipped: tuple[str, ...]
    not_denied: tuple[str, ...]
    highest: int


class Reader:
    """What a profile answers: to a call by name, whatever its arguments, or to a number."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.compiled = compile_profile(profile)
        self._program = bpf.instructions(self.compiled.code)
        self._arch = libseccomp.native()

    def of_number(self, number: int, args: Sequence[int] = ()) -> str:
        """Return the answer to one call; an argument that is not given is 0."""
        return bpf.answer(self._program, number=number, arch=self._arch, args=args)

    def answers(self, name: str, args: Sequence[int] = ()) -> frozenset[str]:
        """Return the answers to a call; without ``args``, those that the profile's own conditions tell apart.

        For a name that this libseccomp does not know, or only for another machine, it is what the rules say: what a
        newer libseccomp would make of them.
        """
        number = libseccomp.number_of(name)
        if number is not None and number >= 0:
            return frozenset(self.of_number(number, given) for given in ([args] if args else samples(name, [self])))
        rules = [rule for rule in self.profile.syscalls if name in rule.names]
        plain = [rule for rule in rules if not rule.args]
        if plain:  # the first rule without arguments counts, in libseccomp too
            return frozenset({_answer(plain[0].action, rule_errno(plain[0]))})
        return frozenset({self.of_number(UNKNOWN), *(_answer(rule.action, rule_errno(rule)) for rule in rules)})


def _values(arg: Arg) -> Iterator[int]:
    """Yield values on both sides of a condition."""
    bits = [1 << bit for bit in range(64) if arg.value >> bit & 1] if arg.op == "SCMP_CMP_MASKED_EQ" else []
    for value in (0, arg.value, arg.value_two, *bits):
        yield from (max(value - 1, 0), value, min(value + 1, _WORD64))


def samples(name: str, readers: Sequence[Reader]) -> list[tuple[int, ...]]:
    """Return argument lists that lie on both sides of each condition that the profiles have on a call; in order."""
    by_index: dict[int, set[int]] = {}
    for reader in readers:
        for rule in reader.profile.syscalls:
            for arg in (rule.args or ()) if name in rule.names else ():
                by_index.setdefault(arg.index, set()).update(_values(arg))
    choices = [sorted(by_index.get(index, {0})) for index in range(max(by_index, default=-1) + 1)]
    return list(itertools.islice(itertools.product(*choices), _COMBINATIONS))


def _answer(action: str, errno_ret: int) -> str:
    return bpf.word(libseccomp.action(action, errno_ret))


def rule_errno(rule: Rule) -> int:
    """Return the errno of an ERRNO rule; EPERM where the rule names none."""
    return EPERM if rule.errno_ret is None else rule.errno_ret


def _variants(rule: Rule) -> Iterator[_Args]:
    """Yield the argument lists to add for one rule: like runc, several conditions on one index are alternatives."""
    args = tuple((arg.index, arg.op, arg.value, arg.value_two) for arg in rule.args or ())
    if len({arg[0] for arg in args}) == len(args):
        yield args
    else:
        yield from ((arg,) for arg in args)


def _fill(target: libseccomp.Filter, profile: Profile) -> tuple[int, list[tuple[str, str]]]:
    """Add all rules; return the highest number and the (name, action) that libseccomp does not know."""
    unknown: list[tuple[str, str]] = []
    highest = -1
    for rule in profile.syscalls:
        action = libseccomp.action(rule.action, rule_errno(rule))
        for name in rule.names:
            number = libseccomp.number_of(name)
            if number is None:
                unknown.append((name, rule.action))
                continue
            highest = max(highest, number)
            for args in _variants(rule):
                target.add(action, number, args)
    return highest, unknown


def compile_profile(profile: Profile) -> Compiled:
    """Return the program of a flat ``profile``; ``ProfileError`` for one that libseccomp refuses."""
    target = libseccomp.Filter(libseccomp.action(profile.default_action, profile.default_errno_ret))
    try:
        target.set_architectures(profile.architectures or ())
        highest, unknown = _fill(target, profile)
        code = target.export()
    finally:
        target.close()
    passing = profile.default_action in _PASSING
    opened = {name for name, action in unknown if passing and action not in _PASSING}
    return Compiled(
        code=code if passing or highest < 0 else stub.program(highest, libseccomp.native()) + code,
        skipped=tuple(sorted({name for name, _ in unknown} - opened)),
        not_denied=tuple(sorted(opened)),
        highest=highest,
    )
