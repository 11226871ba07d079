"""Where the weights can lie, and how much of them."""

from __future__ import annotations

from typing import Final

from syncstack.doctor.model import Check, Finding, Remedy, broken, holds, skip
from syncstack.facts import Facts

_MIB: Final = 1 << 20
# What Docker gives a container by default; vLLM's and torch's own worker queues live there, our weights do not.
_SHM_BYTES: Final = 64 * _MIB
# Below this, left-over files have eaten it.
_SHM_FREE_BYTES: Final = 8 * _MIB
# Less holds no model worth the name, whatever its size is.
_BUDGET_BYTES: Final = 256 * _MIB
MORE_MEMORY: Final = Remedy(
    compose="mem_limit: 8g in the trainer (its own need and one copy of the weights)",
    kubernetes="resources: {limits: {memory: 8Gi}} in the trainer (its own need and one copy of the weights)",
)
# A reserve that fails like this was allowed, but there is no memory for it.
_FULL: Final = ("ENOSPC", "ENOMEM", "EDQUOT", "EFBIG")
_NUMA_CALLS: Final = ("get_mempolicy", "set_mempolicy", "mbind")


def shown(count: int | None) -> str:
    """Return bytes as people read them."""
    if count is None:
        return "unlimited"
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count // _MIB} MiB" if count >= _MIB else f"{count // 1024} KiB"


def _memfd(facts: Facts) -> Finding:
    made, reserved = facts.syscalls["memfd_create"], facts.memory.memfd_reserve
    consequence = "The zero-copy host transport cannot hold the weights"
    if made.verdict == "ok" and reserved is not None and any(word in reserved.evidence for word in _FULL):
        return broken(reserved.evidence, consequence, MORE_MEMORY)
    for fact, call in ((made, "memfd_create"), (reserved, "fallocate")):
        if fact is not None and fact.verdict != "ok":
            return broken(fact.evidence, consequence, _allow(call))
    return holds(made.evidence + ("" if reserved is None else f"; {reserved.evidence}"))


def _allow(call: str) -> Remedy:
    return Remedy(
        other=f"a profile that allows {call}: restrictive.json and permissive.json both do",
        compose='security_opt: ["seccomp=./seccomp/restrictive.json"]',
        kubernetes="securityContext: {seccompProfile: {type: Localhost, localhostProfile: syncstack/restrictive.json}}",
    )


def _budget(facts: Facts) -> Finding:
    memory = facts.memory
    if memory.budget_bytes is None:
        return skip("neither free memory nor a limit could be read")
    observed = f"{shown(memory.budget_bytes)} may still be taken"
    if memory.cgroup_headroom_bytes is not None and memory.available_bytes is not None:
        observed += f": the least of {shown(memory.available_bytes)} free on the machine and "
        observed += f"{shown(memory.cgroup_headroom_bytes)} below the limit of {shown(memory.cgroup_limit_bytes)}"
    if memory.budget_bytes >= _BUDGET_BYTES:
        return holds(observed)
    return broken(
        f"{observed}; needed: {shown(_BUDGET_BYTES)} and the weights",
        "The kernel counts the weights' memfd to the trainer, which writes it, and kills the process at its limit",
        MORE_MEMORY,
    )


def _shm(facts: Facts) -> Finding:
    memory = facts.memory
    if memory.shm_bytes is None:
        return skip(memory.evidence)
    free = memory.shm_bytes if memory.shm_free_bytes is None else memory.shm_free_bytes
    observed = f"/dev/shm: {shown(memory.shm_bytes)}, {shown(free)} free"  # noqa: S108 - text
    headroom = memory.cgroup_headroom_bytes
    if headroom is not None and headroom < free:
        observed += f", of which {shown(headroom)} can be filled before the container's memory limit"
    if memory.shm_bytes >= _SHM_BYTES and free >= _SHM_FREE_BYTES:
        return holds(observed)
    full = memory.shm_bytes >= _SHM_BYTES
    return broken(
        f"{observed}; needed: {shown(_SHM_FREE_BYTES if full else _SHM_BYTES)}{' free' if full else ''}",
        "The engine's own worker processes may be killed by SIGBUS as they write; our weights do not go there",
        Remedy(
            other="remove what dead processes left in /dev/shm, or recreate the container" if full else "",
            compose="shm_size: 512m, beside image: and not under build:",
            kubernetes="volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 512Mi}}], "
            "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
        ),
    )


def _numa(facts: Facts) -> Finding:
    memory = facts.memory
    denied = [name for name in _NUMA_CALLS if facts.syscalls[name].verdict != "ok"]
    nodes = len(memory.numa_nodes)
    observed = f"nodes: {nodes or 'unknown'}, allowed: {len(memory.numa_allowed) or nodes or 'all'}; "
    observed += f"{', '.join(denied)}: {facts.syscalls[denied[0]].verdict}" if denied else "policy calls: ok"
    if not denied or nodes <= 1:
        return holds(observed)
    return holds(
        f"{observed}; weights lie on the node of the thread that writes them",
        Remedy(
            other="permissive.json allows the policy calls; no capability is needed",
            compose='security_opt: ["seccomp=./seccomp/permissive.json"]',
            kubernetes="securityContext: "
            "{seccompProfile: {type: Localhost, localhostProfile: syncstack/permissive.json}}",
        ),
    )


def _huge_pages(facts: Facts) -> Finding:
    memory = facts.memory
    pool = f"{memory.huge_pages_free} free of {shown(memory.huge_page_bytes)}" if memory.huge_page_bytes else "none"
    return holds(
        f"reserved: {pool}; transparent: {memory.thp or 'unknown'}; for memfds: {memory.shmem_thp or 'unknown'}"
    )


CHECKS: Final = (
    Check(id="memory.memfd", assertion="a memfd can be made and filled", severity="fail", find=_memfd),
    Check(id="memory.budget", assertion="there is memory for the weights", severity="warn", find=_budget),
    Check(id="memory.shm", assertion="/dev/shm has 64 MiB and is not full", severity="warn", find=_shm),  # noqa: S108 - text
    Check(id="memory.numa", assertion="where the weights lie is known", severity="warn", find=_numa),
    Check(id="memory.huge-pages", assertion="huge pages are counted", severity="warn", find=_huge_pages),
)
