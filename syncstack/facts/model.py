"""What a process can really do, as data. No conclusion without its evidence."""

from __future__ import annotations

from typing import Literal

import msgspec

FACTS_VERSION = 2

Verdict = Literal["ok", "denied", "absent"]

Cause = Literal[
    "none",
    "seccomp",
    "sandbox",
    "old-kernel",
    "yama",
    "uid",
    "non-dumpable",
    "capability",
    "user-namespace",
    "pid-namespace",
    "lsm",
    "target-gone",
    "bad-descriptor",
    "unknown",
]
"""What stands between a process and its peer's descriptors."""


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


class TargetFact(msgspec.Struct, frozen=True, kw_only=True):
    """What ``pidfd_open`` + ``pidfd_getfd`` answered against a real process, and what forbids it if anything does.

    ``target`` is ``child`` (a process of our own, started for this) or ``peer``. ``cause`` names the one gate that
    explains every answer (``syncstack.facts.causes`` has the table); ``evidence`` quotes the answers it rests on.
    ``absent``: the call, the process or the descriptor is not there; no permission is missing.
    """

    target: Literal["child", "peer"]
    verdict: Verdict
    cause: Cause
    evidence: str


class IdentityFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Who this process is to the kernel's permission checks.

    ``uid_map`` and ``gid_map`` are the maps' text, one line per extent. ``yama_scope`` is None where the kernel has no
    Yama; ``yama_evidence`` says which file was read. ``lsm_label`` is "" without a label.
    """

    uid: int
    gid: int
    euid: int
    dumpable: bool
    uid_map: str = ""
    gid_map: str = ""
    lsms: str = ""
    lsm_label: str = ""
    yama_scope: int | None = None
    yama_evidence: str = ""

    @property
    def remapped(self) -> bool:
        """Whether ids are translated: a rootless or user-remapped engine, or a user namespace of one's own."""
        return bool(self.uid_map) and self.uid_map.split() != ["0", "0", "4294967295"]


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, ``nofile`` in descriptors; None means unlimited, or unknown where ``evidence`` says so.

    ``memfd_reserve`` is what a real ``posix_fallocate`` on a memfd answered. ``thp`` and ``shmem_thp`` are the chosen
    words of /sys/kernel/mm/transparent_hugepage. ``budget_bytes`` is how much may still be taken: the least of free
    memory and the cgroup's headroom.
    """

    shm_bytes: int | None
    shm_free_bytes: int | None
    memlock_soft_bytes: int | None
    memlock_hard_bytes: int | None
    nofile_soft: int | None
    nofile_hard: int | None
    cgroup_limit_bytes: int | None
    cgroup_headroom_bytes: int | None
    evidence: str
    cgroup_version: Literal["v1", "v2", "none"] = "none"
    available_bytes: int | None = None
    memfd_reserve: SyscallFact | None = None
    nofile_open: int = 0
    huge_page_bytes: int = 0
    huge_pages_free: int = 0
    thp: str = ""
    shmem_thp: str = ""
    numa_nodes: tuple[int, ...] = ()
    numa_allowed: tuple[int, ...] = ()

    @property
    def budget_bytes(self) -> int | None:
        """What may still be taken, None if nothing bounds it."""
        bounds = [bound for bound in (self.available_bytes, self.cgroup_headroom_bytes) if bound is not None]
        return min(bounds) if bounds else None


class GpuDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device as its driver names it. ``index`` is this process's own and means nothing to any other.

    ``mig``: names of its MIG instances, as far as they are visible here. ``posix_fd`` and ``fabric``: the kinds of
    handle by which its memory can be exported; that a fabric handle really works needs IMEX and only shows by trying.
    """

    uuid: str
    index: int
    name: str
    memory_bytes: int
    compute_mode: str = "default"
    mig: tuple[str, ...] = ()
    vmm: bool = False
    posix_fd: bool = False
    fabric: bool = False
    peers: tuple[str, ...] = ()
    """UUIDs of the devices whose memory this one can reach directly."""


class VisibilityMask(msgspec.Struct, frozen=True, kw_only=True):
    """One environment variable that hides devices, as given and as understood.

    ``kind``: ``unset``, ``all``, ``none``, or ``list`` (then ``entries`` holds indices, ``GPU-...`` or ``MIG-...``
    names, possibly shortened). ``stopped_at`` quotes the first entry at which the driver stops reading, ``misread`` the
    first one that it takes for another.
    """

    name: str
    text: str | None
    kind: Literal["unset", "all", "none", "list"]
    entries: tuple[str, ...] = ()
    stopped_at: str = ""
    misread: str = ""


class AllocatorFact(msgspec.Struct, frozen=True, kw_only=True):
    """Whether torch's CUDA allocator uses expandable segments: from the environment, and from torch where loaded."""

    expandable_segments: bool
    evidence: str


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """NVIDIA devices that this process can see. ``count`` is by device files; the rest comes from a child process.

    ``problem`` is "" or why the driver could not be asked (no library, no permission, a crash of the child).
    """

    count: int
    evidence: str
    driver: str = ""
    devices: tuple[GpuDevice, ...] = ()
    masks: tuple[VisibilityMask, ...] = ()
    allocator: AllocatorFact | None = None
    problem: str = ""

    @property
    def uuids(self) -> frozenset[str]:
        """Names that mean the same to every process of the machine."""
        return frozenset(device.uuid for device in self.devices)


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface; addresses in their usual text form, without a prefix length."""

    name: str
    up: bool
    loopback: bool
    mtu: int
    ipv4: tuple[str, ...] = ()
    ipv6: tuple[str, ...] = ()


class NetworkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Interfaces, and the limits for those who listen."""

    interfaces: tuple[Interface, ...] = ()
    ephemeral_low: int = 0
    ephemeral_high: int = 0
    somaxconn: int = 0
    unprivileged_port_start: int = 1024
    evidence: str = ""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """By which interface and source address a peer is reached; both "" where the kernel knows no way."""

    interface: str
    source: str
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
    device: int = 0
    inode: int = 0
    """``st_dev`` and ``st_ino``: two processes of one host with equal ones see the same folder."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything :func:`syncstack.facts.collect` found out about this process."""

    version: int = FACTS_VERSION
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
    identity: IdentityFacts | None = None
    child: TargetFact | None = None
    """``pidfd_getfd`` against a child of our own: what the filter lets through may still be forbidden by the kernel."""
    network: NetworkFacts = NetworkFacts()

    @property
    def pidfd_getfd(self) -> SyscallFact:
        """The call that other frameworks' IPC of weights stands and falls with."""
        return self.syscalls["pidfd_getfd"]

    @property
    def in_container(self) -> bool:
        """Whether the runtime guess is anything but the bare host."""
        return self.runtime.value != "none"
