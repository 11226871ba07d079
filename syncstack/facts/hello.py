"""What a process says of itself to its peer: identity and facts. The plan is made from two of these."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from syncstack.facts.collect import collect
from syncstack.facts.model import Facts
from syncstack.facts.process import read_text

HELLO_VERSION = 1

Role = Literal["trainer", "engine"]
Memory = Literal["host", "cuda-plain", "cuda-expandable"]
Reach = Literal["unix", "tcp"]


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


@functools.lru_cache(maxsize=1)
def _nonce(pid: int) -> str:
    """One for each life of a process: a forked child has another ``pid``."""
    del pid
    return secrets.token_hex(16)


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
    """This process's hello. Without ``facts`` they are collected now."""
    stat = read_text(Path("/proc/self/stat")).rpartition(")")[2].split()
    return Hello(
        package=metadata.version("syncstack"),
        role=role,
        rank=rank,
        name=name,
        nonce=_nonce(os.getpid()),
        pid=os.getpid(),
        start_ticks=int(stat[19]) if len(stat) > 19 else 0,  # field 22; the name before it may hold anything
        device=device,
        memory=memory,
        transports=tuple(transports),
        reachable=tuple(reachable),
        facts=collect() if facts is None else facts,
    )
