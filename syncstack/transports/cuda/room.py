"""Whether this process may open as many descriptors as memory that is handed over needs, asked before the first."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Literal

from syncstack.errors import TransportError

SPARE = 16
"""Descriptors that other threads may want meanwhile."""


def check_descriptors(count: int, *, side: Literal["trainer", "engine"]) -> float:
    """Return how many more descriptors can be open at once; raise TransportError unless that is ``count`` at least."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = sum(1 for _ in Path("/proc/self/fd").iterdir())
    room = float("inf") if soft == resource.RLIM_INFINITY else soft - opened - SPARE
    if count <= room:
        return room
    raise TransportError(
        f"the {side} may not open enough descriptors for the GPU memory that holds the weights",
        observed=f"RLIMIT_NOFILE {soft}, {opened} open",
        expected=f"{count} more at once, and {SPARE} to spare",
        consequence="Nothing was sent" if side == "trainer" else "Nothing was mapped",
        next_step=f"raise the limit of the {side}'s container (compose: ulimits: {{nofile: 16384}})",
    )
