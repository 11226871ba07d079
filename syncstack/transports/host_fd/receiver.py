"""The worker's half of ``host_fd``: map the sender's segment read-only, digest what comes, hand out views.

Nothing is copied on the host: the engine's loader reads the sender's memory, and where the engine is on a GPU that GPU
takes the digests too, of memory that is page-locked here as well. The rule of ownership: from Staged until the session
is finished the segment belongs to the receiver, and the sender does not write it. The generation in its header makes a
breach visible: it is compared before every tensor that is handed out, and after the load all is digested once more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from syncstack.errors import ProtocolError
from syncstack.transports.host_fd.h2d import ArrivingOnGpu
from syncstack.transports.host_fd.handover import taken
from syncstack.transports.host_fd.segment import ReceiverSegment
from syncstack.transports.pinned import DriverRegistrar
from syncstack.transports.staged import StagedVersion, check_offer
from syncstack.weights.manifest import TensorSlot
from syncstack.wire.messages import BucketReady, Offer, Staged

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""How long the engine's GPU may take to read a version once it is complete."""


class HostFdReceiver:
    """The segments of one link. Called from that link's thread only."""

    def __init__(self, device: Callable[[], torch.device | None] = lambda: None) -> None:
        """``device`` is where the engine's weights lie: a GPU digests what comes."""
        self._device = device
        self._segment: ReceiverSegment | None = None
        self._arriving: tuple[tuple[TensorSlot, ...], ArrivingOnGpu] | None = None
        self._refused = ""
        """The segment that the GPU had no room to verify."""

    def open(self, offer: Offer, fds: list[int]) -> StagedVersion:
        """Accept an offer. The caller closes ``fds``. Raises TransportError or ProtocolError; maps nothing then.

        A segment is known by its nonce alone: not by a process number, which two containers may share, nor by a handle,
        which may differ each time it is made.
        """
        check_offer(offer)
        begin = time.perf_counter()
        if self._segment is None or self._segment.nonce != offer.segment:
            with taken(offer.handle, fds) as fd:
                fresh = ReceiverSegment(fd, nonce=offer.segment, data_bytes=offer.segment_bytes)
            self.close()
            self._segment = fresh
        elif self._segment.data_bytes != offer.segment_bytes:
            raise ProtocolError("a segment changed its size", observed=str(offer.segment_bytes))
        arriving = self._by_gpu(self._segment, offer.tensors)
        if arriving is None:
            return StagedVersion(offer, self._segment, time.perf_counter() - begin)
        return VersionByGpu(offer, self._segment, time.perf_counter() - begin, arriving)

    def _by_gpu(self, segment: ReceiverSegment, tensors: tuple[TensorSlot, ...]) -> ArrivingOnGpu | None:
        """What digests on the engine's GPU; None where it has none, or the GPU cannot read this memory as it should,
        which is said in one warning for each segment."""
        device = self._device()
        if device is None or device.type != "cuda" or self._refused == segment.nonce:
            return None
        if self._arriving is not None and self._arriving[0] == tensors:
            return self._arriving[1]
        self._end_arriving()
        if not segment.pin(partial(DriverRegistrar, device.index, read_only=True)):
            return None
        try:
            self._arriving = tensors, ArrivingOnGpu(device, segment.flat(), tensors)
        except torch.OutOfMemoryError as error:
            self._refused = segment.nonce
            log.warning("weights are verified by the host's cores, which is slower: the GPU has no room: %s", error)
            return None
        return self._arriving[1]

    def _end_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving[1].close()
            self._arriving = None

    def close(self) -> None:
        """Unmap; views that a loader still holds keep the pages alive until they are dropped."""
        self._end_arriving()
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class VersionByGpu(StagedVersion):
    """A version in host memory that the engine's GPU verifies: begun bucket by bucket, and known at the end."""

    def __init__(self, offer: Offer, segment: ReceiverSegment, map_s: float, arriving: ArrivingOnGpu) -> None:
        super().__init__(offer, segment, map_s)
        self._arriving = arriving
        self._expected: list[str] = []
        arriving.begin()

    def read_bucket(self, bucket: BucketReady) -> None:
        """See StagedVersion. What differs is known by ``finish_staging``."""
        self.announced(bucket, after=len(self._expected))
        self._expected += bucket.digests
        self._arriving.advance(len(self._expected), bucket.readable)

    def finish_staging(self) -> Staged:
        """See StagedVersion."""
        if len(self._expected) == len(self.tensors):
            begin = time.perf_counter()
            self.compare(self.tensors, self._finished(), self._expected)
            self._digest_s += time.perf_counter() - begin
        return super().finish_staging()

    def _digested(self, slots: Sequence[TensorSlot]) -> Iterable[str]:
        """See StagedVersion. Of all, which is what is asked for after a load."""
        assert slots is self.offer.tensors
        self._arriving.begin()
        return self._finished()

    def _finished(self) -> list[str]:
        return self._arriving.finish(deadline=time.monotonic() + WAIT_S)
