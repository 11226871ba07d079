"""Where a trainer's weights come from.

The shape of the protocol is vLLM's (``vllm/distributed/weight_transfer/base.py``): cheap metadata, and an iteration
that may be collective. Ours adds ``aliases``, because a tied tensor must be sent once and known under both names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from syncstack.weights.meta import ParamMeta


@runtime_checkable
class WeightSource(Protocol):
    """A trainer rank's weights, in checkpoint names."""

    def metadata(self) -> Sequence[ParamMeta]:
        """Name, dtype and shape of each tensor, in the order of iteration. Cheap: moves nothing."""
        ...

    def aliases(self) -> Mapping[str, str]:
        """Tied names: alias to the name under which ``metadata`` has the tensor."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` in the order of ``metadata``. Every rank must iterate if the source is sharded.

        Several are read at once, so a source must not write into one that is still referenced.
        """
        ...


@runtime_checkable
class Located(Protocol):
    """What a source also has if its weights may lie on a GPU: without it the plan takes them to lie on the host."""

    def example(self) -> torch.Tensor | None:
        """One of the tensors as it lies now; None for a source without tensors. Moves and gathers nothing."""
        ...


def example_of(source: WeightSource) -> torch.Tensor | None:
    """A tensor of a source that says where its weights lie; None for one that does not."""
    return source.example() if isinstance(source, Located) else None


@runtime_checkable
class Resident(Protocol):
    """What a source also has if all its tensors can be held at once without taking memory: it is then read at once."""

    def stays(self) -> bool:
        """Whether iteration gives the weights' own memory, gathers nothing and makes nothing."""
        ...


def stays(source: WeightSource) -> bool:
    """Whether a source says that its tensors can all be held at once."""
    return isinstance(source, Resident) and source.stays()


class ModuleSource:
    """The state dict of a ``torch.nn.Module``: parameters and persistent buffers.

    One that is sharded (FSDP2, or anything else whose parameters are DTensors) is gathered tensor by tensor, so that a
    rank holds a few whole ones and never the model; every rank of its mesh must go through it then.

    Two names with the same storage, offset, shape and strides are one tensor (tied weights); views that overlap in
    another way are sent separately, each with its own values.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._sharded: bool | None = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = dict(self._module.state_dict(keep_vars=True))
        self._sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
        return tensors

    @staticmethod
    def _tied(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        places = [_local(tensor).data_ptr() for tensor in tensors.values()]
        often = {place for place, count in Counter(places).items() if count > 1}
        first: dict[tuple[object, ...], str] = {}
        tied = {}
        for (name, tensor), place in zip(tensors.items(), places, strict=True):
            if place not in often:
                continue
            target = first.setdefault(ModuleSource._identity(tensor), name)
            if target != name:
                tied[name] = target
        return tied

    @staticmethod
    def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
        # An empty tensor has no address to be identified by: each is its own.
        tensor = _local(tensor)
        address = tensor.data_ptr() if tensor.numel() else id(tensor)
        return (tensor.device, address, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def metadata(self) -> Sequence[ParamMeta]:
        """See WeightSource."""
        tensors = self._tensors()
        tied = self._tied(tensors)
        return tuple(
            ParamMeta(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
            if name not in tied
        )

    def aliases(self) -> Mapping[str, str]:
        """See WeightSource."""
        return self._tied(self._tensors())

    def example(self) -> torch.Tensor | None:
        """See Located. One on a GPU if there is any."""
        found = [_local(tensor).detach() for tensor in self._tensors().values() if tensor.numel()]
        return next((tensor for tensor in found if tensor.device.type == "cuda"), found[0] if found else None)

    def stays(self) -> bool:
        """See Resident. As of the last look at the module, of which each refit begins with one."""
        if self._sharded is None:
            self._tensors()
        return not self._sharded

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._tensors()
        tied = self._tied(tensors)
        for name, tensor in tensors.items():
            if name not in tied:
                found = tensor.detach()
                yield name, found.full_tensor() if isinstance(found, DTensor) else found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
