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

WINDOW = 8
"""Tensors that are handed to the threads ahead of the one that is waited for."""


class ValueReader:
    """One per sender. ``window_bytes`` bounds what the tensors ahead may hold together, one tensor aside."""

    def __init__(self, *, bucket_bytes: int, window_bytes: int | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self._window_bytes = window_bytes
        self._busy: Future[None] | None = None
        self._threads = ThreadPoolExecutor(min(MAX_WRITERS, os.cpu_count() or 1), "syncstack-write")
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
        for slot, found in self._worked(self._values(source, wanted, manifest, stop), work):
            done.append((slot, found))
            filled += slot.nbytes
            if filled >= self._bucket_bytes:
                yield first, done
                first, filled, done = first + len(done), 0, []
        if done:
            yield first, done

    def _worked(
        self, values: Iterator[tuple[TensorSlot, torch.Tensor]], work: Work[R]
    ) -> Iterator[tuple[TensorSlot, R]]:
        """Work in several threads, a few tensors ahead; yields in order. The values of the window are held together.

        One core cannot fill a memory bus; memmove and the digest release the interpreter lock.
        """
        window: deque[tuple[TensorSlot, Future[R]]] = deque()
        held = 0
        try:
            for slot, value in values:
                window.append((slot, self._threads.submit(work, slot, value)))
                held += slot.nbytes
                while len(window) >= WINDOW or (self._window_bytes is not None and held > self._window_bytes):
                    done, future = window.popleft()
                    held -= done.nbytes
                    yield done, future.result()
            while window:
                done, future = window.popleft()
                yield done, future.result()
        finally:
            # After a failure nobody may work on: its memory is about to be given up.
            wait([future for _, future in window])

    def _values(
        self, source: WeightSource, wanted: Sequence[Wanted], manifest: Manifest, stop: threading.Event
    ) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
        """Each slot with the source's value for it, in order, until ``stop``; counts the bytes that will be cast."""
        tensors = iter(source)
        self.cast_bytes = 0
        name, value = None, torch.empty(0)
        for want, slot in zip(wanted, manifest.tensors, strict=True):
            if stop.is_set():
                raise TransportError("the version was given up")
            if want.source != name:
                name, value = want.source, _next_tensor(tensors, want.source)
                if str(value.dtype) != f"torch.{slot.dtype}":
                    self.cast_bytes += value.numel() * value.element_size()
            yield slot, value

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _next_tensor(tensors: Iterator[tuple[str, torch.Tensor]], name: str) -> torch.Tensor:
    for found, tensor in tensors:
        if found == name:
            return tensor
    raise TransportError(
        "the weight source does not give what its metadata announced",
        expected=name,
        consequence="The refit was not started on the engine's weights",
    )


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
