"""Hellos built by hand: a pair that meets every need, and small edits that take one thing away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from syncstack.facts import (
    Capabilities,
    Facts,
    FolderFact,
    GpuDevice,
    GpuFacts,
    Guess,
    Hello,
    IdentityFacts,
    Interface,
    MemoryFacts,
    NetworkFacts,
    SyscallFact,
    TargetFact,
)
from syncstack.plan import BEST_FIRST

T = TypeVar("T")
Pair = tuple[Hello, Hello]

GPU = "GPU-aaaa"
OTHER_GPU = "GPU-bbbb"


def put(thing: T, path: str, value: object) -> T:
    """A copy of ``thing`` with what ``path`` names (attributes and keys, with dots between) replaced.

    Where a part of the path is None there is nothing to replace.
    """
    if thing is None:
        return thing
    head, _, rest = path.partition(".")
    if isinstance(thing, Mapping):
        return {**thing, head: put(thing[head], rest, value) if rest else value}  # type: ignore[return-value]
    new = put(getattr(thing, head), rest, value) if rest else value
    return msgspec.structs.replace(thing, **{head: new})  # type: ignore[type-var]


def device(uuid: str = GPU, **changes: Any) -> GpuDevice:
    fields: dict[str, Any] = {
        "uuid": uuid,
        "index": 0,
        "name": "NVIDIA H200",
        "memory_bytes": 1,
        "vmm": True,
        "posix_fd": True,
    }
    return GpuDevice(**{**fields, **changes})


def call(name: str) -> SyscallFact:
    return SyscallFact(name=name, number=1, verdict="ok", evidence=f"{name} = EBADF")


def facts() -> Facts:
    """A process of a container that shares everything with its sibling."""
    return Facts(
        machine="x86_64",
        kernel="6.18.44",
        uid=10001,
        gid=10001,
        pid=7,
        seccomp_mode=2,
        seccomp_filters=1,
        no_new_privs=True,
        capabilities=Capabilities(effective=(), permitted=(), inheritable=(), bounding=(), ambient=()),
        namespaces={"pid": "41", "ipc": "42", "net": "43", "mnt": "44", "user": "45", "uts": "46"},
        boot_id="aaaaaaaa-0000",
        runtime=Guess(value="docker", evidence="/.dockerenv exists"),
        memory=MemoryFacts(
            shm_bytes=None,
            shm_free_bytes=None,
            memlock_soft_bytes=None,
            memlock_hard_bytes=None,
            nofile_soft=1 << 20,
            nofile_hard=None,
            cgroup_limit_bytes=None,
            cgroup_headroom_bytes=None,
            evidence="",
            memfd_reserve=call("fallocate"),
        ),
        gpu=GpuFacts(count=1, evidence="/dev: nvidia0", driver="580.1", devices=(device(),)),
        syscalls={name: call(name) for name in ("pidfd_open", "pidfd_getfd", "memfd_create")},
        socket_dir=FolderFact(
            path="/run/syncstack", exists=True, writable=True, mounted=True, evidence="tmpfs", device=5, inode=9
        ),
        identity=IdentityFacts(
            uid=10001, gid=10001, euid=10001, dumpable=True, uid_map="0 0 4294967295", lsm_label="docker-default"
        ),
        child=TargetFact(target="child", verdict="ok", cause="none", evidence="pidfd_getfd(child) = 5"),
        network=NetworkFacts(
            interfaces=(
                Interface(name="lo", up=True, loopback=True, mtu=65536, ipv4=("127.0.0.1",), ipv6=("::1",)),
                Interface(name="eth0", up=True, loopback=False, mtu=1500, ipv4=("172.18.0.2",), ipv6=("fe80::1",)),
            )
        ),
    )


def best_pair() -> Pair:
    """Two processes that meet every need of every transport, of a build that speaks all of them."""
    sender = Hello(
        package="0.1.0",
        role="trainer",
        nonce="a" * 32,
        pid=7,
        start_ticks=1,
        device=GPU,
        memory="cuda-plain",
        transports=BEST_FIRST,
        reachable=("unix", "tcp"),
        facts=facts(),
    )
    engine = msgspec.structs.replace(sender, role="engine", name="engine-0", nonce="b" * 32, pid=8, reachable=())
    return sender, engine


def both(pair: Pair, path: str, value: object) -> Pair:
    return put(pair[0], path, value), put(pair[1], path, value)


def trainer(pair: Pair, path: str, value: object) -> Pair:
    return put(pair[0], path, value), pair[1]


def engine(pair: Pair, path: str, value: object) -> Pair:
    return pair[0], put(pair[1], path, value)


def cpu_pair() -> Pair:
    """Two containers without a GPU."""
    pair = both(both(best_pair(), "device", ""), "memory", "host")
    return both(pair, "facts.gpu", GpuFacts(count=0, evidence="no /dev/nvidia* and no NVIDIA driver"))


def apart(pair: Pair) -> Pair:
    """No shared folder, no socket reached: what is left for descriptors is pidfd_getfd."""
    pair = both(pair, "reachable", ("tcp",))
    return engine(pair, "facts.socket_dir.inode", 10)


def round_trip(pair: Pair) -> Pair:
    sender, receiver = (msgspec.json.decode(msgspec.json.encode(hello), type=Hello) for hello in pair)
    return sender, receiver
