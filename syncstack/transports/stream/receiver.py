"""The worker's half of ``stream``: take the bytes off the link into memory of its own, digest them there, hand out
views."""

from __future__ import annotations

import time

from syncstack.errors import ProtocolError
from syncstack.transports.staged import StagedVersion, check_offer
from syncstack.transports.stream.memory import OwnMemory
from syncstack.wire.messages import BucketReady, Offer, Staged

KIND = "stream"
"""The handle of an offer whose bytes follow."""


class StreamedVersion(StagedVersion):
    """A version whose bytes come over the link, from the first of the data area to the last."""

    def __init__(self, offer: Offer, memory: OwnMemory, map_s: float) -> None:
        super().__init__(offer, memory, map_s)
        self._own = memory
        self._generation = memory.generation
        self._come = 0

    def place(self, nbytes: int) -> memoryview:
        """See StagedVersion. What has been announced and digested is never written again."""
        if nbytes > self.offer.segment_bytes - self._come:
            raise ProtocolError(
                "more bytes than were offered",
                observed=f"{self._come + nbytes} bytes",
                expected=f"<= {self.offer.segment_bytes}",
            )
        self._come += nbytes
        return self._own.data[self._come - nbytes : self._come]

    def read_bucket(self, bucket: BucketReady) -> None:
        """See StagedVersion."""
        slots = self.offer.tensors[bucket.first : bucket.first + len(bucket.digests)]
        end = max((slot.offset + slot.nbytes for slot in slots), default=0)
        if end > self._come:
            raise ProtocolError(
                "tensors were announced before their bytes came",
                observed=f"{self._come} bytes",
                expected=f"at least {end}",
            )
        super().read_bucket(bucket)

    def finish_staging(self) -> Staged:
        """See StagedVersion."""
        self._own.protect()
        return super().finish_staging()

    def _lend(self, low: int, high: int) -> memoryview:
        part = self._own.lend(low, high)
        self.check_unchanged()  # after it is lent: see OwnMemory
        return part


class StreamReceiver:
    """The memory of one link. Called from that link's thread only."""

    def __init__(self) -> None:
        self._memory: OwnMemory | None = None

    def open(self, offer: Offer) -> StreamedVersion:
        """Accept an offer; the link's last version must have been closed. Raises TransportError or ProtocolError.

        The memory of the last version is used again if it has the size and no view of it is left.
        """
        check_offer(offer)
        begin = time.perf_counter()
        memory = self._memory
        if memory is None or memory.data_bytes != offer.segment_bytes or not memory.reclaim():
            self._free()
            memory = self._memory = OwnMemory(offer.segment_bytes)
        return self._version(offer, memory, time.perf_counter() - begin)

    def _version(self, offer: Offer, memory: OwnMemory, map_s: float) -> StreamedVersion:
        return StreamedVersion(offer, memory, map_s)

    def close(self) -> None:
        """Free the memory; what a loader still holds stays readable until it is dropped."""
        self._free()

    def _free(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
