"""What this process can really do: probed, never inferred from flags. Imports no torch."""

from syncstack.facts.collect import collect
from syncstack.facts.model import (
    Capabilities,
    Facts,
    FolderFact,
    GpuFacts,
    Guess,
    MemoryFacts,
    SyscallFact,
    Verdict,
)

__all__ = [
    "Capabilities",
    "Facts",
    "FolderFact",
    "GpuFacts",
    "Guess",
    "MemoryFacts",
    "SyscallFact",
    "Verdict",
    "collect",
]
