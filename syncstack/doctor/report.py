"""Everything that one run of the doctor found out; ``-o json`` prints it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from syncstack.doctor.model import Outcome
from syncstack.facts import Facts


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What two processes have in common. Namespaces and folder are False on different hosts."""

    host: bool
    user: bool
    folder: bool
    pid: bool
    ipc: bool
    net: bool
    userns: bool

    def lines(self) -> tuple[str, str]:
        """Return what is shared and what is not, for people."""
        words = {
            "host": self.host,
            "user id": self.user,
            "socket folder": self.folder,
            "PID namespace": self.pid,
            "IPC namespace": self.ipc,
            "network namespace": self.net,
            "user namespace": self.userns,
        }
        yes, no = ([word for word, shared in words.items() if shared is wanted] for wanted in (True, False))
        return f"shared: {', '.join(yes) or 'nothing'}", f"not shared: {', '.join(no) or 'nothing'}"


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of an engine, its own checks and those of the link, what is shared with it, and the plan's choice."""

    link: str
    about: str
    shared: Shared
    choice: str
    checks: tuple[Outcome, ...]
    facts: Facts


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    version: int = 2
    summary: str
    package: str
    checks: tuple[Outcome, ...]
    facts: Facts
    peers: tuple[Peer, ...] = ()

    def all_checks(self) -> Iterator[Outcome]:
        """Yield every outcome, of both sides."""
        yield from self.checks
        for peer in self.peers:
            yield from peer.checks

    def about(self) -> Iterator[str]:
        """Yield what anybody who reads a report asks first."""
        facts = self.facts
        yield f"syncstack {self.package}, {facts.machine}, kernel {facts.kernel}"
        yield f"runtime {facts.runtime.value}: {facts.runtime.evidence}"

    def evidence(self) -> Iterator[str]:
        """Yield the answers of the kernel that the checks rest on, without addresses and identifiers."""
        facts = self.facts
        for name, fact in facts.syscalls.items():
            yield f"{name}: {fact.verdict}: {fact.evidence}"
        if facts.child is not None:
            yield f"pidfd_getfd of a child: {facts.child.verdict}, cause {facts.child.cause}: {facts.child.evidence}"
        yield f"memory: {facts.memory.evidence}"
        yield f"GPU: {facts.gpu.evidence}" + (f"; {facts.gpu.problem}" if facts.gpu.problem else "")
