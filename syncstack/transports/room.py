"""Whether memory for a whole version can be had, asked before it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from syncstack.errors import TransportError
from syncstack.facts.cgroup import cgroup
from syncstack.facts.process import read_text


def check_room(size: int, *, side: Literal["trainer", "engine"], kind: str = "memory") -> None:
    """Raise TransportError when ``size`` cannot fit: the kernel would answer with its OOM killer, not an errno."""
    lines = read_text(Path("/proc/meminfo")).splitlines()
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    limit = cgroup().limit  # the limit, not the headroom: page cache counts as used and can be dropped
    bounds = {"available memory": available, "the container's memory limit": limit}
    for name, bound in bounds.items():
        if bound is not None and size > bound:
            raise TransportError(
                f"no room for the weights in {kind}",
                observed=f"{name}: {bound} bytes",
                expected=f"at least {size} bytes",
                consequence="Nothing was sent" if side == "trainer" else "Nothing was received",
                next_step=f"raise the memory limit of the {side}'s container",
            )
