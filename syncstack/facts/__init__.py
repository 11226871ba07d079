"""What this process can really do: probed, never inferred from flags. Imports no torch."""

from syncstack.facts.collect import collect
from syncstack.facts.hello import Hello, say_hello
from syncstack.facts.model import (
    AllocatorFact,
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
    Verdict,
    VisibilityMask,
)

__all__ = [
    "AllocatorFact",
    "Capabilities",
    "Cause",
    "Facts",
    "FolderFact",
    "GpuDevice",
    "GpuFacts",
    "Guess",
    "Hello",
    "IdentityFacts",
    "Interface",
    "MemoryFacts",
    "NetworkFacts",
    "SyscallFact",
    "TargetFact",
    "Verdict",
    "VisibilityMask",
    "collect",
    "say_hello",
]
