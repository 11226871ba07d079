"""Whether this process may open as many descriptors as memory that is handed over needs, asked before the first."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Literal

from syncstack.errors import TransportError

SPARE = 16
"""Descriptors that other threads may want meanwhile."""


def may_open(count: int) -> bool:
    """Whether ``count`` more descriptors can be open at once."""
    soft, opened = _limit()
    return soft == resource.RLIM_INFINITY or opened + count + SPARE <= soft


def check_descriptors(count: int, *, side: Literal["trainer", "engine"]) -> None:
    """Raise TransportError unless ``count`` more descriptors can be open at once."""
    if may_open(count):
        return
    soft, opened = _limit()
    raise TransportError(
        f"the {side} may not open enough descriptors for the GPU memory that holds the weights",
        observed=f"RLIMIT_NOFILE {soft}, {opened} open",
        expected=f"{count} more at once, and {SPARE} to spare",
        consequence="Nothing was sent" if side == "trainer" else "Nothing was mapped",
        next_step=f"raise the limit of the {side}'s container (compose: ulimits: {{nofile: 16384}})",
    )


def _limit() -> tuple[int, int]:
    """How many descriptors this process may have open, and has."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], sum(1 for _ in Path("/proc/self/fd").iterdir())
