"""Limits on memory and descriptors."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from syncstack.facts.model import MemoryFacts
from syncstack.facts.process import read_text

# cgroup v1 writes "no limit" as the largest multiple of a page.
_UNLIMITED_BYTES: Final = 1 << 60


def _shm(path: Path) -> tuple[int | None, int | None, str]:
    try:
        found = os.statvfs(path)
    except OSError as error:
        return None, None, f"{path}: {error.strerror}"
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return size, free, f"statvfs({path}): {size} bytes, {free} free"


def _limit(which: int) -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(which)
    return (None if soft == resource.RLIM_INFINITY else soft, None if hard == resource.RLIM_INFINITY else hard)


def _groups(cgroup: str) -> list[tuple[str, str, str]]:
    """Return (folder, limit file, usage file) to try, below /sys/fs/cgroup, from the text of /proc/self/cgroup."""
    tries = []
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            tries.append((f"memory{path}", "memory.limit_in_bytes", "memory.usage_in_bytes"))
        if not controllers:
            tries.append((path.lstrip("/"), "memory.max", "memory.current"))
    # In a container the path is the host's, and the container's own group is mounted as the root.
    tries += [("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"), ("", "memory.max", "memory.current")]
    return tries


def cgroup_memory(root: Path = Path("/")) -> tuple[int | None, int | None, str]:
    """Return (limit, headroom, evidence) in bytes; None without a limit."""
    base = root / "sys/fs/cgroup"
    for folder, limit_name, usage_name in _groups(read_text(root / "proc/self/cgroup")):
        text, usage = read_text(base / folder / limit_name), read_text(base / folder / usage_name)
        if text and usage.isdigit():
            limit = int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None
            headroom = None if limit is None else max(0, limit - int(usage))
            return limit, headroom, f"{base / folder / limit_name}: {text}"
    return None, None, "no cgroup memory limit to be read"


def memory() -> MemoryFacts:
    """Return the limits of this process."""
    shm_bytes, shm_free, shm_evidence = _shm(Path("/dev/shm"))  # noqa: S108 - looked at, not written
    memlock, nofile = _limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE)
    limit, headroom, cgroup_evidence = cgroup_memory()
    return MemoryFacts(
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
        memlock_soft_bytes=memlock[0],
        memlock_hard_bytes=memlock[1],
        nofile_soft=nofile[0],
        nofile_hard=nofile[1],
        cgroup_limit_bytes=limit,
        cgroup_headroom_bytes=headroom,
        evidence=f"{shm_evidence}; {cgroup_evidence}",
    )
