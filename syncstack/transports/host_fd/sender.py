"""The trainer's half of ``host_fd``: write one version into the segment once, tell every worker as it grows.

Digest and copy are one pass in cache-sized pieces, so the sender reads its weights from memory once and writes them
once; the workers digest a bucket while the sender fills the next.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from syncstack.transports.answers import collect_answers
from syncstack.transports.host_fd.d2h import LeavingBucket, LeavingGpu
from syncstack.transports.host_fd.handover import FdWay, default_way, give
from syncstack.transports.host_fd.segment import SenderSegment
from syncstack.transports.pinned import DriverRegistrar
from syncstack.transports.values import Run, ValueReader, check_shape, plain
from syncstack.weights.digest import Hasher, digest
from syncstack.weights.manifest import WHOLE, Manifest, Share, TensorSlot, Wanted, layout
from syncstack.weights.source import WeightSource, example_of
from syncstack.wire.link import Link
from syncstack.wire.messages import BucketReady, Offer, Staged, StageEnd

PIECE_BYTES = 1 << 20
"""Copy and digest in pieces of this size: the digest finds its piece in the cache."""

GPU_BUCKET_BYTES = 64 << 20
"""Buckets of weights on a GPU, at least: with 16, 32 and 128 MiB an H200 takes 1.3, 1.15 and 1.02 times as long."""

BUCKETS_AHEAD = 2
"""Buckets of a GPU that are on their way beside the one that is waited for."""


class Written(NamedTuple):
    """What is to be announced."""

    first: int
    tensors: Sequence[tuple[TensorSlot, str]]
    """Each with its digest."""
    readable: int = 0
    """See BucketReady."""


class HostFdSender:
    """One per trainer rank. Called by the coordinator, from one thread; blocks until every worker has verified."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self._segment: SenderSegment | None = None
        self._known: WeakKeyDictionary[Link, str] = WeakKeyDictionary()
        self._reader = ValueReader(bucket_bytes=bucket_bytes)
        self._gpu = LeavingGpu()
        self.write_s = 0.0
        """How long the last version took to write and announce; what it took beyond that was waiting for workers."""

    @property
    def cast_bytes(self) -> int:
        """See Sender."""
        return self._reader.cast_bytes

    @property
    def unpinned(self) -> str:
        """See Sender."""
        return (self._segment.unpinned or "") if self._segment else ""

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
        share: Share = WHOLE,
    ) -> tuple[Manifest, list[Staged]]:
        """Move one version to every link's worker and wait until each has read and verified it.

        ``wait_s`` bounds each message on a link, not the whole: how long a version takes depends on its size.
        ``fd_ways`` says how a link's worker comes by the segment; left out: as the link allows.

        A worker that refuses ends this at once, whatever the source is doing; what it still gives goes nowhere, and
        the next call waits for it to be done. Raises DigestMismatch, TransportError, LinkLost or DeadlineExceeded; the
        segment is given up then, because a worker may still be reading it, and no reference to it is kept.
        """
        self._reader.await_idle(wait_s)
        manifest = layout(wanted, share)
        segment = self._ensure_segment(manifest.total_bytes)
        stop = threading.Event()
        try:
            generation = segment.begin_write()
            for link in links:
                way = (fd_ways or {}).get(link) or default_way(link)
                self._offer(link, way, segment, manifest, session, version, generation, time.monotonic() + wait_s)
            buckets = self._buckets(segment, source, wanted, manifest, stop, wait_s)
            filling = self._reader.start(lambda: self._send(segment, buckets, links, session, wait_s))
            num = len(manifest.tensors)
            return manifest, collect_answers(links, filling, session=session, num_tensors=num, wait_s=wait_s)
        except BaseException:
            stop.set()
            if self._segment is segment:
                self.retire()
            segment.close()
            self._reader.release(segment.close)  # the frames of its writers hold views
            raise

    def _buckets(
        self,
        segment: SenderSegment,
        source: WeightSource,
        wanted: Sequence[Wanted],
        manifest: Manifest,
        stop: threading.Event,
        wait_s: float,
    ) -> Iterator[Written]:
        """Write every bucket, by this host's cores or by the GPU that holds the weights; yields it when it is there."""
        example = example_of(source)
        if example is None or example.device.type != "cuda":
            buckets = self._reader.buckets(source, wanted, manifest, partial(_write, segment), stop)
            return (Written(first, tensors) for first, tensors in buckets)
        segment.pin(partial(DriverRegistrar, example.device.index))
        groups = self._reader.grouped(source, wanted, manifest, stop, least_bytes=GPU_BUCKET_BYTES)
        return self._from_gpu(segment, groups, wait_s)

    def _from_gpu(self, segment: SenderSegment, groups: Iterator[tuple[int, Run]], wait_s: float) -> Iterator[Written]:
        """A bucket is copied while the next is asked for."""
        leaving: deque[tuple[int, LeavingBucket]] = deque()

        def left() -> Iterator[Written]:
            first, bucket = leaving.popleft()
            deadline = time.monotonic() + wait_s
            for readable in bucket.steps(deadline=deadline):
                yield Written(first, (), readable)
            yield Written(first, bucket.wait(deadline=deadline))

        try:
            for first, values in groups:
                leaving.append((first, self._gpu.start(values, partial(_place, segment), partial(_write, segment))))
                if len(leaving) > BUCKETS_AHEAD:
                    yield from left()
            while leaving:
                yield from left()
        finally:
            self._gpu.settle()

    def _send(
        self,
        segment: SenderSegment,
        buckets: Iterator[Written],
        links: Sequence[Link],
        session: str,
        wait_s: float,
    ) -> None:
        """Tell every worker of each bucket as it is filled, and then that there are no more."""
        begin = time.perf_counter()
        for written in buckets:
            digests = tuple(found for _, found in written.tensors)
            bucket = BucketReady(session=session, first=written.first, digests=digests, readable=written.readable)
            for link in links:
                link.send(bucket, deadline=time.monotonic() + wait_s)
        segment.end_write()
        for link in links:
            link.send(StageEnd(session=session), deadline=time.monotonic() + wait_s)
        self.write_s = time.perf_counter() - begin

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
            share=manifest.share,
        )
        link.send(offer, fds=() if self._known.get(link) == segment.nonce else fds, deadline=deadline)
        self._known[link] = segment.nonce

    def close(self) -> None:
        """Give up the segment and end the writers."""
        self.retire()
        self._reader.close()

    def retire(self) -> None:
        """Give up the segment: the next refit gets fresh memory, and a worker that still reads this one is safe."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._known.clear()


def _place(segment: SenderSegment, slot: TensorSlot) -> torch.Tensor:
    """Where a tensor goes to, as a tensor."""
    place = segment.data[slot.offset : slot.offset + slot.nbytes]
    return torch.frombuffer(place, dtype=getattr(torch, slot.dtype)).view(slot.shape)


def _write(segment: SenderSegment, slot: TensorSlot, value: torch.Tensor) -> str:
    """Cast and copy one tensor into its slot; returns the digest of its bytes as they travel.

    Views of the segment live no longer than this, so that it can be unmapped while the source is being asked.
    """
    check_shape(slot, value)
    if slot.nbytes == 0:
        return digest(b"")
    place = segment.data[slot.offset : slot.offset + slot.nbytes]
    if plain(slot, value):
        return _copy_and_digest(segment.address + slot.offset, value.data_ptr(), slot.nbytes)
    with torch.no_grad():
        _place(segment, slot).copy_(value)
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
