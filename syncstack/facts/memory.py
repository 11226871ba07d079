"""Limits on memory and descriptors, and how memory is laid out here."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
from pathlib import Path
from typing import Final

from syncstack.facts import process
from syncstack.facts.cgroup import cgroup
from syncstack.facts.model import MemoryFacts, SyscallFact
from syncstack.facts.process import read_text
from syncstack.facts.syscalls import verdict_of

_RESERVE_BYTES: Final = 64 << 10
_FALLOCATE: Final = {"x86_64": 285, "aarch64": 47}
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")


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


def reserve() -> SyscallFact:
    """Reserve a little memory in a memfd for real, and give it back: that is how the transports do it."""
    shown = f"posix_fallocate(memfd, 0, {_RESERVE_BYTES})"
    result, code = -1, 0
    try:
        descriptor = os.memfd_create("syncstack-probe", os.MFD_CLOEXEC)
    except OSError as error:
        shown, code = "memfd_create", error.errno or 0
    else:
        try:
            os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
            result = 0
        except OSError as error:
            code = error.errno or 0
        finally:
            os.close(descriptor)
    verdict = verdict_of(result, code)
    if verdict == "ok" and result == -1:  # the call was reached, but what counts is the memory
        verdict = "denied"
    evidence = f"{shown} = {errno.errorcode.get(code, 'error') if result == -1 else 'ok'}"
    number = _FALLOCATE.get(platform.machine(), -1)
    return SyscallFact(name="posix_fallocate", number=number, verdict=verdict, evidence=evidence)


def meminfo() -> dict[str, int]:
    """Return /proc/meminfo: bytes where it has a unit, else counts."""
    found = {}
    for line in read_text(Path("/proc/meminfo")).splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[key] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a kernel list such as ``0-2,5``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def chosen(text: str) -> str:
    """Return the word in brackets, as in ``always [madvise] never``; "" where there is none."""
    match = re.search(r"\[(\S+)\]", text)
    return match[1] if match else ""


def memory() -> MemoryFacts:
    """Return the limits of this process."""
    shm_bytes, shm_free, shm_evidence = _shm(Path("/dev/shm"))  # noqa: S108 - looked at, not written
    memlock, nofile = _limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE)
    group, machine = cgroup(), meminfo()
    available = machine.get("MemAvailable")
    return MemoryFacts(
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
        memlock_soft_bytes=memlock[0],
        memlock_hard_bytes=memlock[1],
        nofile_soft=nofile[0],
        nofile_hard=nofile[1],
        cgroup_limit_bytes=group.limit,
        cgroup_headroom_bytes=group.headroom,
        evidence=f"{shm_evidence}; {group.evidence}; MemAvailable: {available}",
        cgroup_version=group.version,
        available_bytes=available,
        memfd_reserve=reserve(),
        nofile_open=_open_descriptors(),
        huge_page_bytes=machine.get("Hugepagesize", 0),
        huge_pages_free=machine.get("HugePages_Free", 0),
        thp=chosen(read_text(_THP / "enabled")),
        shmem_thp=chosen(read_text(_THP / "shmem_enabled")),
        numa_nodes=numbers(read_text(Path("/sys/devices/system/node/online"))),
        numa_allowed=numbers(process.status().get("Mems_allowed_list", "")),
    )


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - one of them is the listing's own
    except OSError:
        return 0
