"""Say what each profile answers to one system call, and why."""

from __future__ import annotations

import difflib

import msgspec

from syncstack.errors import UsageError
from syncstack.seccomp.table import ARG_NOTES, PROFILES, ROWS, Answer, Row


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """``answers`` maps a profile's name to its answer in words."""

    name: str
    answers: dict[str, str]
    why: str


_WORDS = {
    Answer.ALLOW: "allowed",
    Answer.EPERM: "EPERM (forbidden)",
    Answer.ENOSYS: "ENOSYS (as if the kernel did not have it)",
}


def _rows() -> dict[str, Row]:
    return {name: row for row in ROWS for name in row.names}


def explain(name: str) -> Explanation:
    """Return what the profiles answer to the call ``name``; ``UsageError`` for a name that is not in the table."""
    if name in ARG_NOTES:
        note = ARG_NOTES[name]
        return Explanation(name=name, answers=dict.fromkeys(PROFILES, "depends on its argument"), why=note)
    rows = _rows()
    if name not in rows:
        close = difflib.get_close_matches(name, [*rows, *ARG_NOTES], n=3)
        raise UsageError(
            f"{name!r} is not in the table",
            expected=f"one of {', '.join(close)}" if close else "the name of an x86_64 or aarch64 system call",
            consequence="A call that no row names answers ENOSYS under both profiles",
        )
    row = rows[name]
    return Explanation(name=name, answers={p: _WORDS[row.answer(p)] for p in PROFILES}, why=row.why)
