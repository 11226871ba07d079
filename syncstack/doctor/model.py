"""What a check is, what it needs, and what can come of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import msgspec

Status = Literal["pass", "warn", "fail", "skip", "crashed"]
Severity = Literal["warn", "fail"]

HINTS = "docs/doctor.md"

T = TypeVar("T")
"""What is examined: one process's facts, or a pair of processes."""


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """The least that helps: the line to write in compose, the one in Kubernetes, and what neither of them can say.

    ``other`` is for the node, the environment or the program; it is shown first, since it then costs no privilege.
    """

    other: str = ""
    compose: str = ""
    kubernetes: str = ""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.other or self.compose or self.kubernetes)


NOTHING = Remedy()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found: ``holds`` is None where it does not apply (``observed`` then says why).

    ``remedy`` beside an assertion that holds is for programs that need more than syncstack does. ``severity`` says
    that this finding counts less, or more, than its check does.
    """

    holds: bool | None
    observed: str
    consequence: str = ""
    remedy: Remedy = NOTHING
    severity: Severity | None = None


def holds(observed: str, remedy: Remedy = NOTHING) -> Finding:
    """Return that the assertion holds."""
    return Finding(holds=True, observed=observed, remedy=remedy)


def broken(observed: str, consequence: str, remedy: Remedy, severity: Severity | None = None) -> Finding:
    """Return that the assertion does not hold, what follows from it, and what to change."""
    return Finding(holds=False, observed=observed, consequence=consequence, remedy=remedy, severity=severity)


def skip(reason: str) -> Finding:
    """Return that the assertion does not apply here."""
    return Finding(holds=None, observed=reason)


class Need(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Something that a check cannot do without; ``lack`` returns why it is not there, or ""."""

    name: str
    lack: Callable[[T], str]


class Check(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One assertion in plain words; ``severity`` is what it counts when it does not hold.

    Where one of ``needs`` is lacking the check is skipped, with that reason.
    """

    id: str
    assertion: str
    severity: Severity
    find: Callable[[T], Finding]
    needs: tuple[Need[T], ...] = ()


def hint(check_id: str) -> str:
    """Return where a check is explained."""
    return f"{HINTS}#{check_id}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A check's result, ready to be shown; the texts are those of :class:`Finding`."""

    id: str
    assertion: str
    status: Status
    observed: str
    consequence: str
    remedy: Remedy
    hint: str
