"""Apply a seccomp profile to this process, the way runc does, without a container.

Filters only narrow and stay for good, in all threads and in everything the process starts. ``no_new_privs`` is set, so
setuid programs lose their privilege.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NoReturn

import msgspec

from syncstack.errors import UsageError
from syncstack.seccomp import libseccomp
from syncstack.seccomp.load import Profile, Rule
from syncstack.seccomp.stub import load_stub
from syncstack.seccomp.table import ENOSYS

_Args = tuple[tuple[int, str, int, int], ...]


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a profile: names that this libseccomp does not know, split by what that means.

    ``skipped`` answer the default now (harmless). ``not_denied`` were to be refused under a default that allows: they
    are open.
    """

    skipped: tuple[str, ...]
    not_denied: tuple[str, ...]
    highest: int


def _variants(rule: Rule) -> Iterator[_Args]:
    """Yield the argument lists to add for one rule: like runc, several conditions on one index are alternatives."""
    args = tuple((arg.index, arg.op, arg.value, arg.value_two) for arg in rule.args or ())
    if len({arg[0] for arg in args}) == len(args):
        yield args
    else:
        yield from ((arg,) for arg in args)


def _is_allow(action: str) -> bool:
    return action in ("SCMP_ACT_ALLOW", "SCMP_ACT_LOG")


def _fill(target: libseccomp.Filter, profile: Profile) -> Applied:
    unknown: list[tuple[str, str]] = []
    highest = -1
    for rule in profile.syscalls:
        action = libseccomp.action(rule.action, profile_errno(rule))
        for name in rule.names:
            number = target.resolve(name)
            if number is None:
                unknown.append((name, rule.action))
                continue
            highest = max(highest, number)
            for args in _variants(rule):
                target.add(action, number, args)
    opened = [name for name, action in unknown if _is_allow(profile.default_action) and not _is_allow(action)]
    return Applied(
        skipped=tuple(sorted(name for name, _ in unknown if name not in opened)),
        not_denied=tuple(sorted(opened)),
        highest=highest,
    )


def profile_errno(rule: Rule) -> int:
    """Return the errno of an ERRNO rule; EPERM where the rule names none."""
    return 1 if rule.errno_ret is None else rule.errno_ret


def apply(profile: Profile) -> Applied:
    """Apply a flat ``profile`` to all threads of this process, for good.

    Raises ``ProfileError``: with nothing loaded for a bad profile, with the profile in force when its ENOSYS stub for
    unknown numbers cannot be loaded.
    """
    default = libseccomp.action(profile.default_action, profile.default_errno_ret)
    target = libseccomp.Filter(default)
    try:
        target.set_architectures(profile.architectures or ())
        target.set_attribute(libseccomp.Attribute.NO_NEW_PRIVS, 1)
        target.set_attribute(libseccomp.Attribute.TSYNC, 1)
        applied = _fill(target, profile)
        target.load()
    finally:
        target.close()
    if profile.default_action == "SCMP_ACT_ERRNO" and profile.default_errno_ret != ENOSYS and applied.highest >= 0:
        load_stub(applied.highest)
    return applied


def execute(command: Sequence[str]) -> NoReturn:
    """Replace this process by ``command`` (looked up on PATH); ``UsageError`` when it cannot be started."""
    try:
        os.execvp(command[0], list(command))  # noqa: S606 - no shell is the point
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}", observed=error.strerror) from None
