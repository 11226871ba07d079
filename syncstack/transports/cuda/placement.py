"""Where a tensor lies, as the plan asks for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from syncstack.errors import HandleRefused, TransportError
from syncstack.facts import Facts
from syncstack.facts.hello import Memory
from syncstack.plan.gpu import visible
from syncstack.transports.cuda.driver import Driver, Kind, bare, load_driver

_MEMORY: dict[Kind, Memory] = {"fd": "cuda-expandable", "ipc": "cuda-plain"}


def placement(
    tensor: torch.Tensor | None, facts: Facts, *, driver: Callable[[], Driver] = load_driver
) -> tuple[str, Memory]:
    """The UUID of the GPU that holds a tensor, as ``facts`` name it, and the kind of its memory; ``("", "host")`` on
    the host, and for None. Where the driver's bindings are missing the GPU is named all the same: the trial says why it
    cannot be used. Does not block on the GPU."""
    if tensor is None or tensor.device.type != "cuda":
        return "", "host"
    try:
        found = driver()
        uuid = found.device_of(tensor)
        found.bind(uuid)
    except TransportError:
        return _named(f"GPU-{torch.cuda.get_device_properties(tensor.device).uuid}", facts), "cuda-plain"
    try:
        kind = found.kind(tensor.data_ptr())
    except HandleRefused:
        kind = "ipc"  # of some other allocator: the trial finds out
    return _named(uuid, facts), _MEMORY[kind]


def _named(uuid: str, facts: Facts) -> str:
    """The name that the facts have for it: a MIG instance has another prefix."""
    return next((name for name in visible(facts) if bare(name) == bare(uuid)), uuid)
