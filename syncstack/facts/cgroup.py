"""What the cgroups of this process still give, version 1 and 2, over all groups from its own to the top."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import msgspec

from syncstack.facts.process import read_text

# cgroup v1 writes "no limit" as the largest multiple of a page.
_UNLIMITED_BYTES: Final = 1 << 60


class _Names(msgspec.Struct, frozen=True):
    limit: str
    usage: str
    cache: str


_NAMES: Final = {
    "v1": _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": _Names("memory.max", "memory.current", "inactive_file"),
}

Version = Literal["v1", "v2", "none"]


class CgroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """``limit`` is the least of all groups, ``headroom`` what may still be taken before one of them is full, in bytes.

    None without a limit. File pages that nobody used lately count as free: the kernel drops them before it kills.
    """

    version: Version = "none"
    limit: int | None = None
    headroom: int | None = None
    evidence: str = "no cgroup memory limit to be read"


def _own_group(cgroup: str, controller: str) -> tuple[Literal["v1", "v2"], str]:
    """Return (version, path) of the group by which ``controller`` bounds us, from the text of /proc/self/cgroup."""
    v2 = "/"
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return "v1", path
        if not controllers:
            v2 = path
    return "v2", v2


def _mount(mountinfo: str, version: str, controller: str) -> tuple[str, str]:
    """Return (mount point, the group that is mounted there) of the controller's hierarchy."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" if version == "v2" else kind[0] == "cgroup" and controller in kind[2].split(","):
            return fields[4], fields[3]
    return ("/sys/fs/cgroup", "/") if version == "v2" else (f"/sys/fs/cgroup/{controller}", "/")


def _folders(root: Path, version: str, path: str, controller: str) -> Iterator[Path]:
    """Yield the folders of the group and of those above it, as far as they are mounted here."""
    point, mounted = _mount(read_text(root / "proc/self/mountinfo"), version, controller)
    base, group = root / point.lstrip("/"), PurePosixPath(path)
    # In a container the path may be the host's, with the container's own group mounted at the top.
    inner = group.relative_to(mounted) if group.is_relative_to(mounted) else PurePosixPath()
    while inner.parts and ".." not in inner.parts:
        yield base / inner
        inner = inner.parent
    yield base


def _value(file: Path, name: str) -> int:
    """Return the number beside ``name`` in a file of names and numbers, 0 where there is none."""
    pairs = (line.split() for line in read_text(file).splitlines())
    return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == name), 0)


def cgroup(root: Path = Path("/")) -> CgroupMemory:
    """Return what the groups of this process allow; files are read below ``root``."""
    version, path = _own_group(read_text(root / "proc/self/cgroup"), "memory")
    names = _NAMES[version]
    found = CgroupMemory()
    for folder in _folders(root, version, path, "memory"):
        text, usage = read_text(folder / names.limit), read_text(folder / names.usage)
        if not text or not usage.isdigit():
            continue  # the top of v2 has no limit
        if not text.isdigit() or int(text) >= _UNLIMITED_BYTES:
            if found.version == "none":
                found = CgroupMemory(version=version, evidence=f"{folder / names.limit}: {text}")
            continue
        limit = int(text)
        headroom = max(0, limit - int(usage) + _value(folder / "memory.stat", names.cache))
        tighter = found.limit is None or limit < found.limit
        found = CgroupMemory(
            version=version,
            limit=limit if found.limit is None else min(limit, found.limit),
            headroom=headroom if found.headroom is None else min(headroom, found.headroom),
            evidence=f"{folder / names.limit}: {text}" if tighter else found.evidence,
        )
    return found


def throttled_s(root: Path = Path("/")) -> float:
    """Return for how many seconds, ever, a CPU limit kept this process's group waiting; 0.0 where that is not told."""
    version, path = _own_group(read_text(root / "proc/self/cgroup"), "cpu")
    name, unit = ("throttled_usec", 1e6) if version == "v2" else ("throttled_time", 1e9)
    return max(_value(folder / "cpu.stat", name) / unit for folder in _folders(root, version, path, "cpu"))
