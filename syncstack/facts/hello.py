"""What a process says of itself to its peer: identity and facts. The plan is made from two of these."""

from __future__ import annotations

from typing import Literal

import msgspec

from syncstack.facts.model import Facts

HELLO_VERSION = 1


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
    role: Literal["trainer", "engine"]
    rank: int = 0
    name: str = ""
    nonce: str
    pid: int
    start_ticks: int
    torch: str = ""
    device: str = ""
    memory: Literal["host", "cuda-plain", "cuda-expandable"] = "host"
    transports: tuple[str, ...] = ()
    reachable: tuple[Literal["unix", "tcp"], ...] = ()
    facts: Facts
