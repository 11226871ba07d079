"""What a process can really do, as data. No conclusion without its evidence."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["ok", "denied", "absent"]


class SyscallFact(msgspec.Struct, frozen=True, kw_only=True):
    """What one system call answered to arguments that need no target and change nothing.

    ``ok``: the kernel's own code was reached. ``denied``: EPERM or EACCES, from a filter or, where ``evidence`` says
    so, from the kernel. ``absent``: ENOSYS, from an old kernel, a sandbox, or a filter that hides the call.
    """

    name: str
    number: int
    verdict: Verdict
    evidence: str


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The five sets of this process, by name (``CAP_SYS_PTRACE``), in the kernel's order."""

    effective: tuple[str, ...]
    permitted: tuple[str, ...]
    inheritable: tuple[str, ...]
    bounding: tuple[str, ...]
    ambient: tuple[str, ...]


class Guess(msgspec.Struct, frozen=True, kw_only=True):
    """A conclusion and what it rests on."""

    value: str
    evidence: str


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, ``nofile`` in descriptors; None means unlimited, or unknown where ``evidence`` says so."""

    shm_bytes: int | None
    shm_free_bytes: int | None
    memlock_soft_bytes: int | None
    memlock_hard_bytes: int | None
    nofile_soft: int | None
    nofile_hard: int | None
    cgroup_limit_bytes: int | None
    cgroup_headroom_bytes: int | None
    evidence: str


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """NVIDIA devices that this process can see as files; nothing is opened."""

    count: int
    evidence: str


class FolderFact(msgspec.Struct, frozen=True, kw_only=True):
    """The folder in which trainer and engine meet.

    ``writable`` was tried, by a unix socket bound there and removed. ``mounted``: the folder or a parent of it is a
    mount of its own, other than the root; one container's private folder is not.
    """

    path: str
    exists: bool
    writable: bool
    mounted: bool
    evidence: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything :func:`syncstack.facts.collect` found out about this process."""

    version: int = 1
    machine: str
    kernel: str
    uid: int
    gid: int
    pid: int
    seccomp_mode: int
    seccomp_filters: int
    no_new_privs: bool
    capabilities: Capabilities
    namespaces: dict[str, str]
    boot_id: str
    runtime: Guess
    memory: MemoryFacts
    gpu: GpuFacts
    syscalls: dict[str, SyscallFact]
    socket_dir: FolderFact | None = None

    @property
    def pidfd_getfd(self) -> SyscallFact:
        """The call that other frameworks' IPC of weights stands and falls with."""
        return self.syscalls["pidfd_getfd"]

    @property
    def in_container(self) -> bool:
        """Whether the runtime guess is anything but the bare host."""
        return self.runtime.value != "none"
