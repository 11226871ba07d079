"""Resource limits of the process."""

from __future__ import annotations

from typing import Final

from syncstack.doctor.checks.memory import shown
from syncstack.doctor.model import Check, Finding, Remedy, broken, holds
from syncstack.doctor.needs import GPU
from syncstack.facts import Facts

_MEMLOCK_BYTES: Final = 64 << 20
_NOFILE: Final = 1024


def _nofile(facts: Facts) -> Finding:
    memory = facts.memory
    soft, hard = memory.nofile_soft, memory.nofile_hard
    words = tuple("unlimited" if limit is None else str(limit) for limit in (soft, hard))
    observed = f"soft limit {words[0]}, hard limit {words[1]}, {memory.nofile_open} open"
    if soft is None or soft >= _NOFILE:
        return holds(observed)
    own = hard is None or hard >= _NOFILE
    node = "on the node, LimitNOFILE=16384 for the container runtime: a pod has no field for it"
    return broken(
        observed,
        "GPU memory of a large model is passed as several hundred descriptors",
        Remedy(
            other="before the command: ulimit -n 16384; the hard limit allows it" if own else node,
            compose="ulimits: {nofile: 16384}",
        ),
    )


def _memlock(facts: Facts) -> Finding:
    memory = facts.memory
    soft, hard = memory.memlock_soft_bytes, memory.memlock_hard_bytes
    observed = f"soft limit {shown(soft)}, hard limit {shown(hard)}"
    if "CAP_IPC_LOCK" in facts.capabilities.effective:
        return holds(f"{observed}; CAP_IPC_LOCK is in force, which they do not bind")
    if "CAP_IPC_LOCK" in facts.capabilities.bounding and facts.uid != 0:
        observed += (
            "; CAP_IPC_LOCK was added but is not in force: adding it changes nothing for a user that is not root"
        )
    if soft is None or soft >= _MEMLOCK_BYTES:
        return holds(observed)
    own = hard is None or hard >= _MEMLOCK_BYTES
    node = "it is a node setting, a pod has no field for it: LimitMEMLOCK=infinity for the container runtime"
    return broken(
        f"{observed}; needed: {shown(_MEMLOCK_BYTES)}",
        "NCCL over InfiniBand cannot register its buffers; transfers that need no pinned memory work meanwhile",
        Remedy(
            other="before the command: ulimit -l unlimited, or as far as the hard limit goes" if own else node,
            compose="ulimits: {memlock: -1}",
        ),
    )


CHECKS: Final = (
    Check(id="limits.nofile", assertion="1024 descriptors can be open", severity="warn", find=_nofile),
    Check(
        id="limits.memlock",
        assertion="64 MiB can be locked in memory",
        severity="warn",
        needs=(GPU,),
        find=_memlock,
    ),
)
