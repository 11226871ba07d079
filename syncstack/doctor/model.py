"""What a check is, and what can come of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from syncstack.facts import Facts

Status = Literal["pass", "warn", "fail", "skip", "crashed"]
Severity = Literal["warn", "fail"]

HINTS = "docs/doctor.md"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found: ``holds`` is None where it does not apply (``observed`` then says why).

    ``consequence`` and ``remedy`` are for an assertion that does not hold: what follows, and the line to change.
    """

    holds: bool | None
    observed: str
    consequence: str = ""
    remedy: str = ""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One assertion in plain words; ``severity`` is what it counts when it does not hold."""

    id: str
    assertion: str
    severity: Severity
    find: Callable[[Facts], Finding]

    @property
    def hint(self) -> str:
        """Where the check is explained."""
        return f"{HINTS}#{self.id}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A check's result, ready to be shown; the texts are those of :class:`Finding`."""

    id: str
    assertion: str
    status: Status
    observed: str
    consequence: str
    remedy: str
    hint: str
