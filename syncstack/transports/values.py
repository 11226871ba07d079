"""The source's values for one version: read once and in order, and worked on in several threads a few tensors ahead.

What every sender does, wherever the bytes go then.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from syncstack.errors import DeadlineExceeded, TransportError
from syncstack.threads import in_thread
from syncstack.weights.manifest import Manifest, TensorSlot, Wanted
from syncstack.weights.source import WeightSource

R = TypeVar("R")

Work = Callable[[TensorSlot, torch.Tensor], R]
"""What is done with one value, in a thread of its own."""

MAX_WRITERS = 4
"""Threads that work, at most: with more the memory is the limit."""

RUN_BYTES = 2 << 20
"""Small tensors are worked on in runs of this size: a wake-up costs as much as the copy of one of them."""

AHEAD_BYTES = 64 << 20
"""Small tensors that may have been taken from the source while a large one is worked on."""

Run = list[tuple[TensorSlot, torch.Tensor]]


class ValueReader:
    """One per sender. ``window_bytes`` bounds what is taken from the source behind a run that is not done yet, one run
    aside; left out: ``AHEAD_BYTES``, or two large tensors for each thread."""

    def __init__(self, *, bucket_bytes: int, window_bytes: int | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self._window_bytes = window_bytes
        self._busy: Future[None] | None = None
        self._num_helpers = max(1, min(MAX_WRITERS, os.cpu_count() or 1) - 1)
        self._helpers = ThreadPoolExecutor(self._num_helpers, "syncstack-write")
        self.cast_bytes = 0
        """Bytes of the last version's values that had another dtype than the one in which they travel."""

    def await_idle(self, wait_s: float) -> None:
        """Wait for the source to have given the last tensor that a failed stage asked it for."""
        if self._busy is not None and not wait([self._busy], wait_s).done:
            raise DeadlineExceeded(
                f"the weight source has not returned from the version that failed within {wait_s:g} s",
                consequence="Nothing was sent",
            )
        self._busy = None

    def start(self, call: Callable[[], None]) -> Future[None]:
        """Run what reads and sends in a thread of its own, so that the caller can listen."""
        self._busy = in_thread(call, "syncstack-fill")
        return self._busy

    def release(self, then: Callable[[], None] = lambda: None) -> None:
        """A version was given up: once its thread has ended, drop what its error's frames hold, and call ``then``."""

        def free(busy: Future[None]) -> None:
            error = busy.exception()
            if error is not None:
                traceback.clear_frames(error.__traceback__)
            then()

        if self._busy is not None:
            self._busy.add_done_callback(free)

    def buckets(
        self, source: WeightSource, wanted: Sequence[Wanted], manifest: Manifest, work: Work[R], stop: threading.Event
    ) -> Iterator[tuple[int, list[tuple[TensorSlot, R]]]]:
        """Do ``work`` on every value; yields (index of the first, slots and results) for each bucket that is complete.

        ``stop`` ends it with a TransportError before the next value.
        """
        first, filled, done = 0, 0, list[tuple[TensorSlot, R]]()
        for run in self._worked(self._runs(self.values(source, wanted, manifest, stop)), work):
            done += run
            filled += _size(run)
            if filled >= self._bucket_bytes:
                yield first, done
                first, filled, done = first + len(done), 0, []
        if done:
            yield first, done

    def grouped(
        self,
        source: WeightSource,
        wanted: Sequence[Wanted],
        manifest: Manifest,
        stop: threading.Event,
        *,
        least_bytes: int,
    ) -> Iterator[tuple[int, Run]]:
        """As ``buckets``, with the values themselves, and of ``least_bytes`` at least: for whoever works on them in
        another way."""
        first, group = 0, Run()
        for slot, value in self.values(source, wanted, manifest, stop):
            group.append((slot, value))
            if _size(group) >= max(least_bytes, self._bucket_bytes):
                yield first, group
                first, group = first + len(group), Run()
        if group:
            yield first, group

    def _runs(self, values: Iterator[tuple[TensorSlot, torch.Tensor]]) -> Iterator[Run]:
        """The same values in runs that reach ``RUN_BYTES``, or a bucket; a large tensor is the last of its run."""
        least = min(RUN_BYTES, self._bucket_bytes)
        run = Run()
        for slot, value in values:
            run.append((slot, value))
            if _size(run) >= least:
                yield run
                run = Run()
        if run:
            yield run

    def _worked(self, runs: Iterator[Run], work: Work[R]) -> Iterator[list[tuple[TensorSlot, R]]]:
        """Work on the runs in several threads; yields in order. What was taken from the source is held until then.

        One core cannot fill a memory bus; memmove and the digest release the interpreter lock. This thread asks the
        source, and works too whenever the helpers have enough: a thread that only hands out work is one more to wake,
        on cores that have no time for it.
        """

        def call(run: Run) -> list[tuple[TensorSlot, R]]:
            return [(slot, work(slot, value)) for slot, value in run]

        window: deque[tuple[int, Future[list[tuple[TensorSlot, R]]]]] = deque()
        try:
            for run in runs:
                if sum(not future.done() for _, future in window) <= self._num_helpers:
                    future = self._helpers.submit(call, run)
                else:
                    future = Future()
                    future.set_result(call(run))
                window.append((_size(run), future))
                while window and (window[0][1].done() or self._is_full(window)):
                    yield window.popleft()[1].result()
            while window:
                yield window.popleft()[1].result()
        finally:
            # After a failure nobody may work on: its memory is about to be given up.
            wait([future for _, future in window])

    def _is_full(self, window: Sequence[tuple[int, Future[list[tuple[TensorSlot, R]]]]]) -> bool:
        ahead = sum(num_bytes for num_bytes, _ in window) - window[0][0]
        if self._window_bytes is not None:
            return ahead > self._window_bytes
        return ahead > AHEAD_BYTES and len(window) > 2 * (self._num_helpers + 1)

    def values(
        self, source: WeightSource, wanted: Sequence[Wanted], manifest: Manifest, stop: threading.Event
    ) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
        """Each slot with the source's value for it, in order; counts the bytes that will be cast. Raises TransportError
        once ``stop`` is set."""
        tensors = iter(source)
        self.cast_bytes = 0
        name, value = None, torch.empty(0)
        for want, slot in zip(wanted, manifest.tensors, strict=True):
            check_going(stop)
            if want.source != name:
                name, value = want.source, _next_tensor(tensors, want.source)
                if str(value.dtype) != f"torch.{slot.dtype}":
                    self.cast_bytes += value.numel() * value.element_size()
            yield slot, value

    def close(self) -> None:
        """End the threads."""
        self._helpers.shutdown()


def _size(run: Sequence[tuple[TensorSlot, object]]) -> int:
    return sum(slot.nbytes for slot, _ in run)


def _next_tensor(tensors: Iterator[tuple[str, torch.Tensor]], name: str) -> torch.Tensor:
    for found, tensor in tensors:
        if found == name:
            return tensor
    raise TransportError(
        "the weight source does not give what its metadata announced",
        expected=name,
        consequence="The refit was not started on the engine's weights",
    )


def check_going(stop: threading.Event) -> None:
    """Raise TransportError once a version was given up."""
    if stop.is_set():
        raise TransportError("the version was given up")


def check_shape(slot: TensorSlot, value: torch.Tensor) -> None:
    """Raise TransportError unless a value still has the shape that its metadata told."""
    if value.shape != slot.shape:
        raise TransportError(
            f"{slot.name} changed its shape since its metadata was read",
            observed=str(list(value.shape)),
            expected=str(list(slot.shape)),
        )


def plain(slot: TensorSlot, value: torch.Tensor) -> bool:
    """Whether a value's own memory holds the bytes that travel: on the host, contiguous, of the slot's dtype."""
    return str(value.dtype) == f"torch.{slot.dtype}" and value.is_contiguous() and value.device.type == "cpu"
