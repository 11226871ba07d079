"""Everything that one run of the doctor found out; ``-o json`` prints it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from syncstack.doctor.model import Outcome
from syncstack.facts import Facts


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    version: int = 2
    summary: str
    package: str
    checks: tuple[Outcome, ...]
    facts: Facts

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
