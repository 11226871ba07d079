"""Was a refit as fast as the trial of its links said it would be, and if not, what took the time?"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import msgspec
import torch

from syncstack.refit.trial import Rate
from syncstack.weights.meta import ParamMeta
from syncstack.weights.source import WeightSource

SLOW = 0.5
"""Below this part of the expected rate a path is called slow."""

TOLD_BYTES = 16 << 20
"""Smaller versions are over in a few milliseconds, where one wake-up that comes late makes the difference."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of one version moved. Seconds and bytes."""

    bytes: int
    seconds: float
    first: bool
    """Whether the segment had to be reserved and mapped."""
    source_s: float
    """How long the weight source took to give its tensors."""
    worker_s: float
    """How long the slowest worker digested."""
    cast_bytes: int
    throttled_s: float
    """How long the trainer's cgroup kept it off the processors."""
    unpinned: str = ""
    """Why values of a GPU went through memory that is not page-locked."""


class ClockedSource:
    """A weight source that also says how long it took to give its tensors.

    With ``whole`` it is gone through to its end when the block is left, however that is: the ranks of a sharded source
    gather each tensor together, so one that stops early would leave the others waiting.
    """

    def __init__(self, source: WeightSource, *, whole: bool = False) -> None:
        self._source = source
        self._whole = whole
        self._tensors: Iterator[tuple[str, torch.Tensor]] | None = None
        self._turn = threading.Lock()
        self.seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._whole:
            return
        with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
            while self._next() is not None:
                pass

    def _next(self) -> tuple[str, torch.Tensor] | None:
        """The next tensor; None when there are no more. A stage that failed may have a thread that still asks."""
        with self._turn:
            if self._tensors is None:
                self._tensors = iter(self._source)
            return next(self._tensors, None)

    def metadata(self) -> Sequence[ParamMeta]:
        """See WeightSource."""
        return self._source.metadata()

    def aliases(self) -> Mapping[str, str]:
        """See WeightSource."""
        return self._source.aliases()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            begin = time.perf_counter()
            try:
                given = self._next()
            finally:
                self.seconds += time.perf_counter() - begin
            if given is None:
                return
            yield given


def expected(rate: Rate, stage: Stage) -> float:
    """Bytes per second that ``stage`` should have reached."""
    return rate.first if stage.first else rate.again


def why_slow(rate: Rate, stage: Stage) -> str:
    """The likely cause if the stage was slower than half of what was measured, with its numbers; "" if it was not."""
    found, wanted = stage.bytes / stage.seconds, expected(rate, stage)
    if stage.bytes < TOLD_BYTES or found >= SLOW * wanted:
        return ""
    return f"{found / 1e9:.2f} GB/s where a trial reached {wanted / 1e9:.2f}: {_likely(stage)}"


def _likely(stage: Stage) -> str:
    """What accounts for half of the time, the surest evidence first."""
    half = stage.seconds / 2
    if stage.throttled_s > half / 2:
        return f"the trainer's container was kept off its processors for {stage.throttled_s:.2f} s: raise its CPU limit"
    if stage.source_s > half:
        return f"the weight source took {stage.source_s:.2f} s of {stage.seconds:.2f} s to give its tensors"
    if stage.worker_s > half:
        return (
            f"the engine's worker took {stage.worker_s:.2f} s of {stage.seconds:.2f} s to verify: its processors are "
            "busy (is it generating?) or limited"
        )
    if stage.cast_bytes > stage.bytes / 4:
        return f"{stage.cast_bytes / 1e6:.0f} MB were cast on the way: give the weights in the engine's dtype"
    if stage.unpinned:
        return f"the weights left the GPU through memory that is not page-locked: {stage.unpinned}"
    return "neither source, worker nor cast account for it: other processes use the memory or the processors"
