"""The checks, in the order in which they are shown. ``docs/doctor.md`` has a section for each id."""

from __future__ import annotations

from typing import Final

from syncstack.doctor.checks import gpu, kernel, limits, memory, place, privileges
from syncstack.doctor.model import Check
from syncstack.facts import Facts

CHECKS: Final[tuple[Check[Facts], ...]] = (
    *kernel.CHECKS,
    *memory.CHECKS,
    *place.CHECKS,
    *limits.CHECKS,
    *privileges.CHECKS,
    *gpu.CHECKS,
)
