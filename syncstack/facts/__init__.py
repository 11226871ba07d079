"""What this process can really do: probed, never inferred from flags. Imports no torch."""

from syncstack.facts.collect import collect
from syncstack.facts.hello import Hello, probe_peer, process_nonce, read_hello, say_hello, version_of
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
    Route,
    SyscallFact,
    TargetFact,
    Verdict,
    VisibilityMask,
)
from syncstack.facts.network import route_to
from syncstack.facts.target import Claim, probe_child, probe_target

__all__ = [
    "AllocatorFact",
    "Capabilities",
    "Cause",
    "Claim",
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
    "Route",
    "SyscallFact",
    "TargetFact",
    "Verdict",
    "VisibilityMask",
    "collect",
    "probe_child",
    "probe_peer",
    "probe_target",
    "process_nonce",
    "read_hello",
    "route_to",
    "say_hello",
    "version_of",
]
