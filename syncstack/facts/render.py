"""The facts as one screen of text: what, how it stands, and the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.text import Text

from syncstack.facts.model import Facts, Interface

_STYLES: Final = {"ok": "green", "denied": "red", "absent": "yellow"}
_MIB: Final = 1 << 20

_Line = tuple[str, str, str]


def render(console: Console, facts: Facts) -> None:
    """Print one line for each fact: name, value, evidence."""
    for title, lines in (
        ("process", _process(facts)),
        ("system calls", _calls(facts)),
        ("memory", _memory(facts)),
        ("GPU", _gpu(facts)),
        ("network", _network(facts)),
    ):
        console.print(Text(title, style="bold"))
        for name, value, evidence in lines:
            # A path or a label may hold anything, also what a terminal takes for a command.
            parts = (f"  {name:17} ", (f"{value:8} ", _STYLES.get(value, "")), (evidence, "dim"))
            text = Text.assemble(*parts)
            text.plain = "".join(char if char.isprintable() else "?" for char in text.plain)
            console.print(text, soft_wrap=True)


def _size(value: int | None) -> str:
    return "unlimited" if value is None else f"{value // _MIB} MiB" if value >= _MIB else f"{value} bytes"


def _process(facts: Facts) -> Iterator[_Line]:
    yield "runtime", facts.runtime.value, f"{facts.runtime.evidence}; kernel {facts.kernel} {facts.machine}"
    filters = f"Seccomp {facts.seccomp_mode}, filters {facts.seccomp_filters}, NoNewPrivs {int(facts.no_new_privs)}"
    yield "seccomp", "filtered" if facts.seccomp_mode else "open", filters
    held = facts.capabilities
    yield "capabilities", str(len(held.effective)), f"effective; {len(held.bounding)} in the bounding set"
    if facts.identity is not None:
        who = facts.identity
        ids = f"uid {who.uid}, effective {who.euid}, gid {who.gid}; uid_map {'; '.join(who.uid_map.splitlines())}"
        yield "identity", "remapped" if who.remapped else "as is", ids
        yield "dumpable", "yes" if who.dumpable else "no", "PR_GET_DUMPABLE"
        yield "yama", "none" if who.yama_scope is None else str(who.yama_scope), who.yama_evidence
        yield "security label", who.lsm_label or "none", "/proc/self/attr/current"
    links = ", ".join(f"{kind} {inode or '?'}" for kind, inode in facts.namespaces.items())
    yield "namespaces", "", f"{links}; boot id {facts.boot_id}"
    if facts.socket_dir is not None:
        yield "socket folder", "ok" if facts.socket_dir.writable else "unusable", facts.socket_dir.evidence


def _calls(facts: Facts) -> Iterator[_Line]:
    for fact in facts.syscalls.values():
        yield fact.name, fact.verdict, fact.evidence
    if facts.child is not None:
        yield "getfd of a child", facts.child.verdict, f"{facts.child.cause}; {facts.child.evidence}"


def _memory(facts: Facts) -> Iterator[_Line]:
    memory = facts.memory
    yield "budget", _size(memory.budget_bytes), memory.evidence
    limits = f"cgroup {memory.cgroup_version}, headroom {_size(memory.cgroup_headroom_bytes)}"
    yield "cgroup limit", _size(memory.cgroup_limit_bytes), limits
    if memory.memfd_reserve is not None:
        yield "memfd", memory.memfd_reserve.verdict, memory.memfd_reserve.evidence
    free = "unknown" if memory.shm_free_bytes is None else _size(memory.shm_free_bytes)
    yield "/dev/shm free", free, "not where the weights go"  # noqa: S108 - text
    yield "locked memory", _size(memory.memlock_soft_bytes), f"hard limit {_size(memory.memlock_hard_bytes)}"
    soft = "unlimited" if memory.nofile_soft is None else str(memory.nofile_soft)
    yield "descriptors", soft, f"hard limit {memory.nofile_hard or 'unlimited'}, {memory.nofile_open} open"
    pages = f"{memory.huge_pages_free} free of {_size(memory.huge_page_bytes)}; transparent: {memory.thp or 'unknown'}"
    yield "huge pages", "", f"{pages}, for shared memory: {memory.shmem_thp or 'unknown'}"
    allowed = ", ".join(map(str, memory.numa_allowed)) or "unknown"
    yield "NUMA nodes", str(len(memory.numa_nodes)), f"memory allowed on: {allowed}"


def _gpu(facts: Facts) -> Iterator[_Line]:
    gpu = facts.gpu
    yield "devices", str(gpu.count), "; ".join(part for part in (gpu.evidence, gpu.problem) if part)
    for device in gpu.devices:
        kinds = [name for name, has in (("fd", device.posix_fd), ("fabric", device.fabric)) if has]
        about = f"{device.uuid}, {_size(device.memory_bytes)}, mode {device.compute_mode}, "
        about += f"handles: {' '.join(kinds) or 'none'}, peers: {len(device.peers)}"
        yield f"  {device.index}", device.name, "; ".join((about, *device.mig))
    for mask in gpu.masks:
        if mask.kind != "unset":
            misread = f"; takes {mask.misread}" if mask.misread else ""
            stopped = f"; reading stops at {mask.stopped_at}" if mask.stopped_at else ""
            yield mask.name, mask.kind, f"{mask.text!r}{misread}{stopped}"
    if gpu.count and gpu.allocator is not None:
        kind = "expandable" if gpu.allocator.expandable_segments else "plain"
        yield "torch's allocator", kind, gpu.allocator.evidence


def _addresses(interface: Interface) -> str:
    return ", ".join((*interface.ipv4, *interface.ipv6)) or "no address"


def _network(facts: Facts) -> Iterator[_Line]:
    network = facts.network
    for interface in network.interfaces:
        if interface.up:
            yield interface.name, "up", f"{_addresses(interface)}; mtu {interface.mtu}"
    down = [interface.name for interface in network.interfaces if not interface.up]
    if down:
        yield "down", str(len(down)), ", ".join(down)
    ports = f"{network.ephemeral_low}-{network.ephemeral_high}"
    yield "ephemeral ports", "", f"{ports}; backlog {network.somaxconn}"
