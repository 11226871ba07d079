"""Facts of our making for the doctor's tests: those of our own containers, with changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from syncstack.doctor.checks import CHECKS
from syncstack.doctor.examine import examine
from syncstack.doctor.model import Check, Outcome
from syncstack.facts import (
    Capabilities,
    Cause,
    Facts,
    FolderFact,
    GpuDevice,
    GpuFacts,
    Guess,
    IdentityFacts,
    Interface,
    MemoryFacts,
    NetworkFacts,
    SyscallFact,
    TargetFact,
    collect,
)
from syncstack.seccomp.expected import expected

MADE = "made for a test"
GIB = 1 << 30
NO_CAPABILITIES = Capabilities(effective=(), permitted=(), inheritable=(), bounding=(), ambient=())
SHARED = FolderFact(path="/run/syncstack", exists=True, writable=True, mounted=True, evidence=MADE, device=9, inode=1)
IDENTITY = IdentityFacts(
    uid=10001, gid=10001, euid=10001, dumpable=True, uid_map="0 0 4294967295", gid_map="0 0 4294967295",
    lsms="lockdown,capability,landlock,bpf", yama_scope=None, yama_evidence="no ptrace_scope",
)  # fmt: skip
MEMORY = MemoryFacts(
    shm_bytes=64 << 20, shm_free_bytes=64 << 20, memlock_soft_bytes=64 << 10, memlock_hard_bytes=64 << 10,
    nofile_soft=1024, nofile_hard=524288, cgroup_limit_bytes=None, cgroup_headroom_bytes=None, evidence=MADE,
    available_bytes=8 * GIB, memfd_reserve=SyscallFact(name="fallocate", number=0, verdict="ok", evidence=MADE),
    nofile_open=5, thp="madvise", shmem_thp="never", numa_nodes=(0,), numa_allowed=(0,),
)  # fmt: skip
NETWORK = NetworkFacts(
    interfaces=(
        Interface(name="lo", up=True, loopback=True, mtu=65536, ipv4=("127.0.0.1",), ipv6=("::1",)),
        Interface(name="eth0", up=True, loopback=False, mtu=1500, ipv4=("172.18.0.2",)),
    ),
    ephemeral_low=32768, ephemeral_high=60999, somaxconn=4096, evidence=MADE,
)  # fmt: skip


def child(verdict: str, cause: Cause, evidence: str = MADE) -> TargetFact:
    return TargetFact(target="child", verdict=verdict, cause=cause, evidence=evidence)  # type: ignore[arg-type]


def container(profile: str = "restrictive", **changes: Any) -> Facts:
    """Return the facts of our own containers under ``profile``, with ``changes``."""
    syscalls = {
        name: SyscallFact(name=name, number=0, verdict=word, evidence=MADE)  # type: ignore[arg-type]
        for name, word in expected(profile, engine="25.0.0").items()
    }
    open_to_it = syscalls["pidfd_getfd"].verdict == "ok"
    made = replace(
        collect(), uid=10001, gid=10001, seccomp_mode=0 if profile == "unconfined" else 2, seccomp_filters=1,
        no_new_privs=True, capabilities=NO_CAPABILITIES, runtime=Guess(value="docker", evidence=MADE), memory=MEMORY,
        gpu=GpuFacts(count=0, evidence=MADE), socket_dir=SHARED, syscalls=syscalls, identity=IDENTITY, network=NETWORK,
        child=child("ok", "none") if open_to_it else child("denied", "seccomp"),
    )  # fmt: skip
    return replace(made, **changes)


def device(**changes: Any) -> GpuDevice:
    made = GpuDevice(uuid="GPU-0", index=0, name="NVIDIA H200", memory_bytes=141 * GIB, vmm=True, posix_fd=True)
    return replace(made, **changes)


def gpus(*devices: GpuDevice, **changes: Any) -> GpuFacts:
    return replace(GpuFacts(count=len(devices), evidence=MADE, driver="580.95", devices=devices), **changes)


def syscall(facts: Facts, name: str, verdict: str) -> dict[str, SyscallFact]:
    return {**facts.syscalls, name: replace(facts.syscalls[name], verdict=verdict)}


def statuses(facts: Facts, checks: Sequence[Check[Facts]] = CHECKS) -> dict[str, str]:
    return {outcome.id: outcome.status for outcome in examine(facts, checks)}


def troubles(facts: Facts) -> dict[str, str]:
    """Return what is not as it should be, by id."""
    return {name: status for name, status in statuses(facts).items() if status in ("warn", "fail", "crashed")}


def one(facts: Facts, name: str) -> Outcome:
    """Return the outcome of one check."""
    (check,) = (check for check in CHECKS if check.id == name)
    (outcome,) = examine(facts, (check,))
    return outcome
