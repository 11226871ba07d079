"""Say what each profile answers to one system call, why, and who needs it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

import msgspec

from syncstack.errors import UsageError
from syncstack.seccomp import builtin
from syncstack.seccomp.compile import REACHED, Reader
from syncstack.seccomp.load import ENGINES, load
from syncstack.seccomp.needs import DANGERS, needs_of
from syncstack.seccomp.table import ARG_NOTES, PROFILES, ROWS, Row


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """``answers``: profile -> its answer in words; ``needed_by``: who needs the call -> what they do without it."""

    name: str
    answers: dict[str, str]
    why: str
    needed_by: dict[str, str]
    dangers: tuple[str, ...]
    history: tuple[str, ...]


_WORDS: Final = {
    "allow": "allowed",
    "log": "allowed and logged",
    "EPERM": "EPERM (forbidden)",
    "ENOSYS": "ENOSYS (as if the kernel did not have it)",
    "kill": "ends the process",
    "trap": "SIGSYS",
}


def words(answers: frozenset[str]) -> str:
    """Return a profile's answers to one call in words; several depend on the call's arguments."""
    if len(answers) == 1:
        (answer,) = answers
        return _WORDS.get(answer, answer)
    return f"by argument: {' or '.join(sorted(_WORDS.get(answer, answer) for answer in answers))}"


def _rows() -> dict[str, Row]:
    return {name: row for row in ROWS for name in row.names}


def _reason(name: str) -> str:
    if name in ARG_NOTES:
        return ARG_NOTES[name]
    rows = _rows()
    if name not in rows:
        close = difflib.get_close_matches(name, [*rows, *ARG_NOTES], n=3)
        raise UsageError(
            f"{name!r} is not in the table",
            expected=f"one of {', '.join(close)}" if close else "the name of an x86_64 or aarch64 system call",
            consequence="A call that no row names answers ENOSYS under both profiles",
        )
    return rows[name].why


def _engine(name: str, engine: str, caps: Sequence[str], kernel: str) -> str:
    """Return the built-in profile's answer, and under which other conditions it would allow the call."""
    answers = Reader(load(engine, caps=caps, kernel=kernel)).answers(name)
    conditions = builtin.granted_with(name, engine)
    if answers & REACHED or not conditions:
        return words(answers)
    return f"{words(answers)}; allowed with {' or '.join(conditions)}"


def explain(name: str, *, profiles: Sequence[str] = (), caps: Sequence[str] = (), kernel: str = "") -> Explanation:
    """Return what our profiles, the engines' built-in ones and ``profiles`` answer to the call ``name``.

    Conditions are decided for ``caps`` and ``kernel``. ``UsageError`` for a name that is not in the table.
    """
    why = _reason(name)
    answers: dict[str, str] = {profile: words(Reader(load(profile)).answers(name)) for profile in PROFILES}
    answers |= {engine: _engine(name, engine, caps, kernel) for engine in ENGINES}
    answers |= {given: words(Reader(load(given, caps=caps, kernel=kernel)).answers(name)) for given in profiles}
    return Explanation(
        name=name,
        answers=answers,
        why=why,
        needed_by={f"{need.who} ({need.shown})" if need.args else need.who: need.without for need in needs_of(name)},
        dangers=tuple(f"{danger.shown}: {danger.why}" for danger in DANGERS if danger.name == name),
        history=builtin.history(name),
    )
