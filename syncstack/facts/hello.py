"""What a process says of itself to its peer: identity and facts. The plan is made from two of these."""

from __future__ import annotations

import functools
import os
import secrets
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import msgspec

from syncstack.errors import UsageError
from syncstack.facts import process
from syncstack.facts.collect import collect
from syncstack.facts.model import FACTS_VERSION, Facts, TargetFact
from syncstack.facts.target import Claim, probe_target

HELLO_VERSION = 1
MAX_HELLO_BYTES: Final = 1 << 20
"""Far above any real hello: one of a machine with 16 GPUs has 40 kB."""

Role = Literal["trainer", "engine"]
Memory = Literal["host", "cuda-plain", "cuda-expandable"]
Reach = Literal["unix", "tcp"]

_REWRITE: Final = "write it again, with `syncstack facts -o json`, in the process's own container"


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and facts of one process; ``syncstack facts -o json`` writes one, ``syncstack plan`` reads two.

    ``nonce`` names the process for its life: pids repeat over namespaces and time. ``start_ticks`` is field 22 of
    /proc/self/stat, which with the pid namespace's inode and the pid names it for the kernel's eyes. ``transports``
    are the names that this build can speak; ``device`` is the UUID of the GPU that holds the weights, "" on the CPU;
    ``memory`` says what kind of memory they lie in.
    ``reachable`` names the ways in which the peer has been reached already, by trying: ``unix``, ``tcp``.
    """

    version: int = HELLO_VERSION
    package: str
    role: Role
    rank: int = 0
    name: str = ""
    nonce: str
    pid: int
    start_ticks: int
    torch: str = ""
    device: str = ""
    memory: Memory = "host"
    transports: tuple[str, ...] = ()
    reachable: tuple[Reach, ...] = ()
    facts: Facts


class _Versions(msgspec.Struct, frozen=True):
    class _Facts(msgspec.Struct, frozen=True):
        version: int

    version: int
    facts: _Facts


@functools.lru_cache(maxsize=1)
def _nonce(pid: int) -> str:  # noqa: ARG001 - a forked child has another pid, and so another nonce
    return secrets.token_hex(16)


def process_nonce() -> str:
    """Return the name of this process for its life; a forked child has another."""
    return _nonce(os.getpid())


def version_of(package: str) -> str:
    """Return a package's version, "" where it is not installed (a source tree on PYTHONPATH); imports nothing."""
    loaded = getattr(sys.modules.get(package), "__version__", "")
    if loaded:
        return str(loaded)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def say_hello(
    role: Role,
    *,
    rank: int = 0,
    name: str = "",
    device: str = "",
    memory: Memory = "host",
    transports: Sequence[str] = (),
    reachable: Sequence[Reach] = (),
    facts: Facts | None = None,
) -> Hello:
    """Return this process's hello. Without ``facts`` they are collected now."""
    life = process.life()
    return Hello(
        package=version_of("syncstack"),
        role=role,
        rank=rank,
        name=name,
        nonce=process_nonce(),
        pid=os.getpid(),
        start_ticks=life[1] if life is not None else 0,
        torch=version_of("torch"),
        device=device,
        memory=memory,
        transports=tuple(transports),
        reachable=tuple(reachable),
        facts=collect() if facts is None else facts,
    )


def probe_peer(peer: Hello, fd: int) -> TargetFact:
    """Try to get descriptor ``fd`` of the process that said ``peer``: see :func:`probe_target`."""
    claim = Claim(
        boot_id=peer.facts.boot_id,
        pid_namespace=peer.facts.namespaces.get("pid", ""),
        start_ticks=peer.start_ticks,
        user_namespace=peer.facts.namespaces.get("user", ""),
        dumpable=peer.facts.identity.dumpable if peer.facts.identity is not None else None,
    )
    return probe_target(peer.pid, fd, claim)


def read_hello(path: Path) -> Hello:
    """Return the hello in a file; UsageError for anything else. The file may be a stranger's."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file", next_step=_REWRITE)  # a pipe that nobody writes would hold us
        with path.open("rb") as file:
            data = file.read(MAX_HELLO_BYTES + 1)
    except (OSError, ValueError) as error:
        observed = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} cannot be read", observed=observed, next_step=_REWRITE) from None
    if len(data) > MAX_HELLO_BYTES:
        raise UsageError(f"{path} is too large for a hello", expected=f"<= {MAX_HELLO_BYTES} bytes", next_step=_REWRITE)
    return _decoded(data, path)


def _decoded(data: bytes, path: Path) -> Hello:
    try:
        # The versions first: what they stand for decides whether the rest can be understood.
        versions = msgspec.json.decode(data, type=_Versions)
        known = (HELLO_VERSION, FACTS_VERSION)
        if (versions.version, versions.facts.version) != known:
            raise UsageError(
                f"{path} holds a hello of another version",
                observed=f"hello {versions.version}, facts {versions.facts.version}",
                expected=f"hello {known[0]}, facts {known[1]}",
                next_step="run the same syncstack release on both sides",
            )
        return msgspec.json.decode(data, type=Hello)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = "".join(char if char.isprintable() else "?" for char in str(error))
        raise UsageError(f"{path} holds no hello", observed=shown, next_step=_REWRITE) from None
