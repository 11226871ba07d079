"""A copy of the last version beside the trainer's weights: what an engine gets that comes back between two refits.

The trainer's own weights may be half-way through an optimizer's step then. So each tensor is copied to host memory as
it passes on its way to the engines: that costs the memory of one version, and a copy in each refit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from syncstack.weights.meta import ParamMeta
from syncstack.weights.source import WeightSource, example_of


class KeptVersion:
    """A weight source of copies of the last version that the engines serve. Used from several threads.

    ``lock`` is held while it is written, which is until the refit has ended, and by whoever sends it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.version: int | None = None
        """Which version it holds; None where that is not the last one that was published."""
        self._metadata: list[ParamMeta] = []
        self._aliases: Mapping[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def metadata(self) -> Sequence[ParamMeta]:
        """See WeightSource."""
        return tuple(self._metadata)

    def aliases(self) -> Mapping[str, str]:
        """See WeightSource."""
        return self._aliases

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self._metadata:
            yield meta.name, self._tensors[meta.name]

    @contextlib.contextmanager
    def keeping(self, source: WeightSource, version: int) -> Iterator[WeightSource]:
        """A source that gives what ``source`` gives and keeps it; kept as ``version`` where the block ends well.

        While somebody sends the version before, this one is not kept: the refit does not wait. Nothing is, then, until
        the next refit.
        """
        holds = self.lock.acquire(blocking=False)
        self.version = None
        if not holds:
            yield source
            return
        keeping = KeepingSource(source, self._tensors)
        try:
            yield keeping
            self._metadata, self._aliases = keeping.end(), dict(source.aliases())
            self.version = version
        finally:
            keeping.end()
            self.lock.release()


class KeepingSource:
    """A weight source that keeps what passes, into ``tensors`` and where it fits into the memory that is there."""

    def __init__(self, source: WeightSource, tensors: dict[str, torch.Tensor]) -> None:
        self._source = source
        self._tensors = tensors
        self._passed: list[ParamMeta] = []
        self._over = False
        self._lock = threading.Lock()

    def end(self) -> list[ParamMeta]:
        """Keep no more, and return what was kept. A stage that failed may have a thread that still asks."""
        with self._lock:
            self._over = True
            return self._passed

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor. Blocks until it is copied."""
        with self._lock, torch.no_grad():
            if self._over:
                return
            kept = self._tensors.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            kept.copy_(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._passed.append(ParamMeta(name=name, dtype=dtype, shape=tuple(tensor.shape)))

    def metadata(self) -> Sequence[ParamMeta]:
        """See WeightSource."""
        return self._source.metadata()

    def aliases(self) -> Mapping[str, str]:
        """See WeightSource."""
        return self._source.aliases()

    def example(self) -> torch.Tensor | None:
        """See Located."""
        return example_of(self._source)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source:
            self._keep(name, tensor)
            yield name, tensor
