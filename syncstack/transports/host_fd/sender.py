"""The trainer's half of ``host_fd``: write one version into the segment once, tell every worker as it grows.

Digest and copy are one pass in cache-sized pieces, so the sender reads its weights from memory once and writes them
once; the workers digest a bucket while the sender fills the next.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from weakref import WeakKeyDictionary

import torch

from syncstack.errors import DigestMismatch, ProtocolError, TransportError
from syncstack.transports.host_fd.segment import SenderSegment
from syncstack.weights.digest import Hasher, digest
from syncstack.weights.manifest import Manifest, TensorSlot, Wanted, layout
from syncstack.weights.source import WeightSource
from syncstack.wire.link import Link, close_fds
from syncstack.wire.messages import BucketReady, Fault, Offer, Staged, StageEnd

PIECE_BYTES = 512 << 10
"""Copy and digest in pieces of this size: source and target of one fit a common second-level cache."""

MAX_WRITERS = 4
"""Threads that write, at most: with more the memory is the limit."""

WINDOW = 8
"""Tensors that are handed to the writers ahead of the one that is waited for."""


class HostFdSender:
    """One per trainer rank. Called by the coordinator, from one thread; blocks until every worker has verified."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._segment: SenderSegment | None = None
        self._known: WeakKeyDictionary[Link, str] = WeakKeyDictionary()
        self._writers = ThreadPoolExecutor(min(MAX_WRITERS, os.cpu_count() or 1), "syncstack-write")
        self.cast_bytes = 0

    def stage(
        self,
        source: WeightSource,
        wanted: Sequence[Wanted],
        links: Sequence[Link],
        *,
        session: str,
        version: int,
        wait_s: float,
    ) -> tuple[Manifest, list[Staged]]:
        """Move one version to every link's worker and wait until each has read and verified it.

        ``wait_s`` bounds each message on a link, not the whole: how long a version takes depends on its size.

        Raises DigestMismatch, TransportError, LinkLost or DeadlineExceeded; the segment must then be retired,
        because a worker may still be reading it.
        """
        manifest = layout(wanted)
        segment = self._ensure_segment(manifest.total_bytes)
        generation = segment.begin_write()
        for link in links:
            self._offer(link, segment, manifest, session, version, generation, time.monotonic() + wait_s)
        for first, digests in self._fill(segment, source, wanted, manifest):
            for link in links:
                bucket = BucketReady(session=session, first=first, digests=digests)
                link.send(bucket, deadline=time.monotonic() + wait_s)
        segment.end_write()
        for link in links:
            link.send(StageEnd(session=session), deadline=time.monotonic() + wait_s)
        num = len(manifest.tensors)
        return manifest, [self._await_staged(link, session, num, time.monotonic() + wait_s) for link in links]

    def _ensure_segment(self, data_bytes: int) -> SenderSegment:
        if self._segment is None or self._segment.data_bytes != data_bytes:
            self.retire()
            self._segment = SenderSegment(data_bytes)
        return self._segment

    def _offer(
        self,
        link: Link,
        segment: SenderSegment,
        manifest: Manifest,
        session: str,
        version: int,
        generation: int,
        deadline: float,
    ) -> None:
        known = self._known.get(link) == segment.nonce
        offer = Offer(
            session=session,
            version=version,
            segment=segment.nonce,
            segment_bytes=segment.data_bytes,
            generation=generation,
            tensors=manifest.tensors,
        )
        link.send(offer, fds=() if known else (segment.fd,), deadline=deadline)
        self._known[link] = segment.nonce

    def _fill(
        self, segment: SenderSegment, source: WeightSource, wanted: Sequence[Wanted], manifest: Manifest
    ) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Write every tensor; yields (index of the first, digests) for each bucket that is complete."""
        area = torch.frombuffer(segment.data, dtype=torch.uint8) if manifest.total_bytes else torch.empty(0)
        first, filled, digests = 0, 0, list[str]()
        for slot, found in self._written(area, segment.data, self._values(source, wanted, manifest)):
            digests.append(found)
            filled += slot.nbytes
            if filled >= self._bucket_bytes:
                yield first, tuple(digests)
                first, filled, digests = first + len(digests), 0, []
        if digests:
            yield first, tuple(digests)

    def _written(
        self, area: torch.Tensor, data: memoryview, values: Iterator[tuple[TensorSlot, torch.Tensor]]
    ) -> Iterator[tuple[TensorSlot, str]]:
        """Write in several threads, a few tensors ahead; yields in order. The values of the window are held together.

        One core cannot fill a memory bus; memmove and the digest release the interpreter lock.
        """
        window: deque[tuple[TensorSlot, Future[str]]] = deque()
        try:
            for slot, value in values:
                window.append((slot, self._writers.submit(_write, area, data, slot, value)))
                if len(window) >= WINDOW:
                    done, future = window.popleft()
                    yield done, future.result()
            while window:
                done, future = window.popleft()
                yield done, future.result()
        finally:
            # After a failure nobody may write on: the segment is about to be given up.
            wait([future for _, future in window])

    def _values(
        self, source: WeightSource, wanted: Sequence[Wanted], manifest: Manifest
    ) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
        """Each slot with the source's value for it, in order; counts the bytes that will be cast."""
        tensors = iter(source)
        self.cast_bytes = 0
        name, value = None, torch.empty(0)
        for want, slot in zip(wanted, manifest.tensors, strict=True):
            if want.source != name:
                name, value = want.source, _next_tensor(tensors, want.source)
                if str(value.dtype) != f"torch.{slot.dtype}":
                    self.cast_bytes += value.numel() * value.element_size()
            yield slot, value

    @staticmethod
    def _await_staged(link: Link, session: str, num_tensors: int, deadline: float) -> Staged:
        message, fds = link.receive(deadline=deadline)
        close_fds(fds)
        if isinstance(message, Fault):
            kind = DigestMismatch if message.kind == DigestMismatch.__name__ else TransportError
            raise kind("the engine's worker refused what it read: " + message.text)
        if not isinstance(message, Staged) or message.session != session:
            raise ProtocolError("unexpected answer on a data link", observed=type(message).__name__, expected="Staged")
        if message.digests_equal != num_tensors:
            raise DigestMismatch(
                "the worker did not verify every tensor",
                observed=f"{message.digests_equal} tensors",
                expected=f"{num_tensors} tensors",
            )
        return message

    def close(self) -> None:
        """Give up the segment and end the writers."""
        self.retire()
        self._writers.shutdown()

    def retire(self) -> None:
        """Give up the segment: the next refit gets fresh memory, and a worker that still reads this one is safe."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._known.clear()


def _next_tensor(tensors: Iterator[tuple[str, torch.Tensor]], name: str) -> torch.Tensor:
    for found, tensor in tensors:
        if found == name:
            return tensor
    raise TransportError(
        "the weight source does not give what its metadata announced",
        expected=name,
        consequence="The refit was not started on the engine's weights",
    )


def _write(area: torch.Tensor, data: memoryview, slot: TensorSlot, value: torch.Tensor) -> str:
    """Cast and copy one tensor into its slot; returns the digest of its bytes as they travel."""
    if value.shape != slot.shape:
        raise TransportError(
            f"{slot.name} changed its shape since its metadata was read",
            observed=str(list(value.shape)),
            expected=str(list(slot.shape)),
        )
    if slot.nbytes == 0:
        return digest(b"")
    dtype = getattr(torch, slot.dtype)
    if value.dtype is dtype and value.is_contiguous() and value.device.type == "cpu":
        return _copy_and_digest(area.data_ptr() + slot.offset, value.data_ptr(), slot.nbytes)
    begin, end = slot.offset, slot.offset + slot.nbytes
    with torch.no_grad():
        area[begin:end].view(dtype).view(slot.shape).copy_(value)
    return digest(data[begin:end])


def _copy_and_digest(to: int, at: int, nbytes: int) -> str:
    """Copy ``nbytes`` of host memory in cache-sized pieces, each digested while it is still in the cache.

    memmove and not torch's copy: the latter starts all of torch's threads for every piece, and on busy cores the
    slowest of them sets the pace, while the worker's digest wants the other core anyway.
    """
    hasher = Hasher()
    source = memoryview((ctypes.c_char * nbytes).from_address(at)).cast("B")
    for low in range(0, nbytes, PIECE_BYTES):
        piece = source[low : low + PIECE_BYTES]
        ctypes.memmove(to + low, at + low, len(piece))
        hasher.update(piece)
    return hasher.hexdigest()
