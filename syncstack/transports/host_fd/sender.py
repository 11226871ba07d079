"""The trainer's half of ``host_fd``: write one version into the segment once, tell every worker as it grows.

Digest and copy are one pass in cache-sized pieces, so the sender reads its weights from memory once and writes them
once; the workers digest a bucket while the sender fills the next.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from weakref import WeakKeyDictionary

import torch

from syncstack.errors import DeadlineExceeded, TransportError
from syncstack.threads import in_thread
from syncstack.transports.host_fd.answers import collect_answers
from syncstack.transports.host_fd.handover import FdWay, default_way, give
from syncstack.transports.host_fd.segment import SenderSegment
from syncstack.weights.digest import Hasher, digest
from syncstack.weights.manifest import Manifest, TensorSlot, Wanted, layout
from syncstack.weights.source import WeightSource
from syncstack.wire.link import Link
from syncstack.wire.messages import BucketReady, Offer, Staged, StageEnd

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
        self._filling: Future[None] | None = None
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
        fd_ways: Mapping[Link, FdWay] | None = None,
    ) -> tuple[Manifest, list[Staged]]:
        """Move one version to every link's worker and wait until each has read and verified it.

        ``wait_s`` bounds each message on a link, not the whole: how long a version takes depends on its size.
        ``fd_ways`` says how a link's worker comes by the segment; left out: as the link allows.

        A worker that refuses ends this at once, whatever the source is doing; what it still gives goes nowhere, and
        the next call waits for it to be done. Raises DigestMismatch, TransportError, LinkLost or DeadlineExceeded; the
        segment is given up then, because a worker may still be reading it, and no reference to it is kept.
        """
        self._await_idle(wait_s)
        manifest = layout(wanted)
        segment = self._ensure_segment(manifest.total_bytes)
        stop = threading.Event()
        try:
            generation = segment.begin_write()
            for link in links:
                way = (fd_ways or {}).get(link) or default_way(link)
                self._offer(link, way, segment, manifest, session, version, generation, time.monotonic() + wait_s)
            buckets = self._fill(segment, source, wanted, manifest, stop)
            self._filling = in_thread(lambda: self._send(segment, buckets, links, session, wait_s), "syncstack-fill")
            num = len(manifest.tensors)
            return manifest, collect_answers(links, self._filling, session=session, num_tensors=num, wait_s=wait_s)
        except BaseException:
            stop.set()
            if self._segment is segment:
                self.retire()
            segment.close()
            if self._filling is not None:
                self._filling.add_done_callback(lambda filling: _release(filling, segment))
            raise

    def _await_idle(self, wait_s: float) -> None:
        """Wait for the source to have given the last tensor that a failed stage asked it for."""
        if self._filling is not None and not wait([self._filling], wait_s).done:
            raise DeadlineExceeded(
                f"the weight source has not returned from the version that failed within {wait_s:g} s",
                consequence="Nothing was sent",
            )
        self._filling = None

    def _send(
        self,
        segment: SenderSegment,
        buckets: Iterator[tuple[int, tuple[str, ...]]],
        links: Sequence[Link],
        session: str,
        wait_s: float,
    ) -> None:
        """Tell every worker of each bucket as it is filled, and then that there are no more."""
        for first, digests in buckets:
            for link in links:
                bucket = BucketReady(session=session, first=first, digests=digests)
                link.send(bucket, deadline=time.monotonic() + wait_s)
        segment.end_write()
        for link in links:
            link.send(StageEnd(session=session), deadline=time.monotonic() + wait_s)

    def _ensure_segment(self, data_bytes: int) -> SenderSegment:
        if self._segment is None or self._segment.data_bytes != data_bytes:
            self.retire()
            self._segment = SenderSegment(data_bytes)
        return self._segment

    def _offer(
        self,
        link: Link,
        way: FdWay,
        segment: SenderSegment,
        manifest: Manifest,
        session: str,
        version: int,
        generation: int,
        deadline: float,
    ) -> None:
        handle, fds = give(segment.fd, way, link)
        offer = Offer(
            session=session,
            version=version,
            segment=segment.nonce,
            segment_bytes=segment.data_bytes,
            generation=generation,
            handle=handle,
            tensors=manifest.tensors,
        )
        link.send(offer, fds=() if self._known.get(link) == segment.nonce else fds, deadline=deadline)
        self._known[link] = segment.nonce

    def _fill(
        self,
        segment: SenderSegment,
        source: WeightSource,
        wanted: Sequence[Wanted],
        manifest: Manifest,
        stop: threading.Event,
    ) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Write every tensor; yields (index of the first, digests) for each bucket that is complete."""
        first, filled, digests = 0, 0, list[str]()
        for slot, found in self._written(segment, self._values(source, wanted, manifest, stop)):
            digests.append(found)
            filled += slot.nbytes
            if filled >= self._bucket_bytes:
                yield first, tuple(digests)
                first, filled, digests = first + len(digests), 0, []
        if digests:
            yield first, tuple(digests)

    def _written(
        self, segment: SenderSegment, values: Iterator[tuple[TensorSlot, torch.Tensor]]
    ) -> Iterator[tuple[TensorSlot, str]]:
        """Write in several threads, a few tensors ahead; yields in order. The values of the window are held together.

        One core cannot fill a memory bus; memmove and the digest release the interpreter lock.
        """
        window: deque[tuple[TensorSlot, Future[str]]] = deque()
        try:
            for slot, value in values:
                window.append((slot, self._writers.submit(_write, segment, slot, value)))
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


def _release(filling: Future[None], segment: SenderSegment) -> None:
    """The writers of a segment that was given up have ended: unmap it. Their error's frames hold views of it."""
    error = filling.exception()
    if error is not None:
        traceback.clear_frames(error.__traceback__)
    segment.close()


def _write(segment: SenderSegment, slot: TensorSlot, value: torch.Tensor) -> str:
    """Cast and copy one tensor into its slot; returns the digest of its bytes as they travel.

    Views of the segment live no longer than this, so that it can be unmapped while the source is being asked.
    """
    if value.shape != slot.shape:
        raise TransportError(
            f"{slot.name} changed its shape since its metadata was read",
            observed=str(list(value.shape)),
            expected=str(list(slot.shape)),
        )
    if slot.nbytes == 0:
        return digest(b"")
    dtype = getattr(torch, slot.dtype)
    place = segment.data[slot.offset : slot.offset + slot.nbytes]
    if value.dtype is dtype and value.is_contiguous() and value.device.type == "cpu":
        return _copy_and_digest(segment.address + slot.offset, value.data_ptr(), slot.nbytes)
    with torch.no_grad():
        torch.frombuffer(place, dtype=dtype).view(slot.shape).copy_(value)
    return digest(place)


def _copy_and_digest(to: int, at: int, nbytes: int) -> str:
    """Copy ``nbytes`` of host memory in cache-sized pieces, each digested while it is still in the cache. The caller
    keeps both ends mapped.

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
