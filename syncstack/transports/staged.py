"""One version in a worker, wherever its bytes lie: verified bucket by bucket, then handed to the engine's loader.

What every receiver does. A transport brings the memory; the engine's thread and the link's thread meet here.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from syncstack.errors import DigestMismatch, LinkLost, ProtocolError, TransportError
from syncstack.weights.digest import digest
from syncstack.weights.manifest import TensorSlot, check_share, check_slots
from syncstack.wire.messages import BucketReady, Chunks, Join, Offer, Staged, Table


class Memory(Protocol):
    """Where the bytes of a version lie in this process."""

    @property
    def data(self) -> memoryview:
        """The data area."""
        ...

    @property
    def generation(self) -> int:
        """Which version it holds, as it is now; another number means that it was written since."""
        ...


class StagedVersion:
    """One version on its way into the engine: the offer, and how much of it was verified."""

    def __init__(self, offer: Offer, memory: Memory, map_s: float) -> None:
        self.offer = offer
        self._memory = memory
        self._generation = offer.generation
        self._map_s = map_s
        self._digest_s = 0.0
        self._digests: list[str] = []
        self._complete = False
        self.lost = False
        """Set when the link ended; the bytes stay readable, but nobody vouches for the rest of the transaction."""

    @property
    def version(self) -> int:
        """Which version it is."""
        return self.offer.version

    @property
    def tensors(self) -> Sequence[TensorSlot]:
        """Its tensors, in order."""
        return self.offer.tensors

    def verified(self) -> list[tuple[TensorSlot, str]]:
        """Each tensor that was verified, with its digest."""
        return list(zip(self.offer.tensors, self._digests, strict=False))

    def place(self, nbytes: int) -> memoryview:
        """Where the next ``nbytes`` from the link belong, for a transport whose bytes come that way; else, and for more
        than was offered, ProtocolError."""
        raise ProtocolError("bytes for a version that lies in the sender's memory", observed=f"{nbytes} bytes")

    def join(self, join: Join, exchange: Callable[[bytes], Sequence[bytes]]) -> None:  # noqa: ARG002 - refused
        """Become a member of the sender's group; ``exchange`` gives this worker's card for everybody's. Anywhere else
        ProtocolError."""
        raise ProtocolError("a group for a version that comes another way", observed=f"{join.size} members")

    def take_cast(self, nbytes: int) -> None:
        """Take the next ``nbytes`` from the group. Anywhere else ProtocolError."""
        raise ProtocolError("bytes in a group for a version that comes another way", observed=f"{nbytes} bytes")

    def hand_over(self, message: Table | Chunks, fds: Sequence[int]) -> None:
        """What a sender of GPU memory tells of it; ``fds`` stay the caller's. Anywhere else ProtocolError."""
        raise ProtocolError(
            "GPU memory for a version that lies elsewhere", observed=f"{type(message).__name__}, {len(fds)} descriptors"
        )

    def read_bucket(self, bucket: BucketReady) -> None:
        """Digest the tensors of one bucket and compare; raises DigestMismatch that names the first that differs."""
        slots = self.announced(bucket, after=len(self._digests))
        begin = time.perf_counter()
        self.compare(slots, self._digested(slots), bucket.digests)
        self._digest_s += time.perf_counter() - begin

    def announced(self, bucket: BucketReady, *, after: int) -> Sequence[TensorSlot]:
        """The tensors of a bucket, which comes after so many tensors; raises ProtocolError where it does not."""
        slots = self.offer.tensors[bucket.first : bucket.first + len(bucket.digests)]
        if bucket.first != after or len(slots) != len(bucket.digests):
            raise ProtocolError(
                "buckets out of order",
                observed=f"tensors {bucket.first}..{bucket.first + len(bucket.digests)}",
                expected=f"from {after}, at most {len(self.offer.tensors)}",
            )
        return slots

    def compare(self, slots: Sequence[TensorSlot], found: Iterable[str], expected: Sequence[str]) -> None:
        """Count the next tensors as verified; raises DigestMismatch at the first that is another than expected."""
        for slot, digest_found, digest_expected in zip(slots, found, expected, strict=True):
            if digest_found != digest_expected:
                raise DigestMismatch(
                    f"{slot.name} arrived with another content",
                    observed=digest_found,
                    expected=digest_expected,
                    consequence="The engine kept its old weights",
                )
            self._digests.append(digest_found)

    def finish_staging(self) -> Staged:
        """All buckets were announced: everything must be verified and the sender must have stopped writing."""
        if len(self._digests) != len(self.offer.tensors):
            raise ProtocolError(
                "the stage ended early",
                observed=f"{len(self._digests)} tensors",
                expected=f"{len(self.offer.tensors)} tensors",
            )
        self.check_unchanged()
        self._complete = True
        return Staged(
            session=self.offer.session, digests_equal=len(self._digests), map_s=self._map_s, digest_s=self._digest_s
        )

    def check_again(self) -> None:
        """Digest everything once more, after the load: what the loader read is what was verified before it."""
        found = self._digested(self.offer.tensors)
        for slot, now, expected in zip(self.offer.tensors, found, self._digests, strict=True):
            if now != expected:
                raise DigestMismatch(f"{slot.name} was changed while the engine was loading it")
        self.check_unchanged()

    def _digested(self, slots: Sequence[TensorSlot]) -> Iterable[str]:
        """The digest of each tensor as its bytes are now."""
        data = self._memory.data
        return (digest(data[slot.offset : slot.offset + slot.nbytes]) for slot in slots)

    def check_unchanged(self) -> None:
        """Raise TransportError if the sender has written since the version was complete."""
        found = self._memory.generation
        if found != self._generation:
            raise TransportError(
                "the sender wrote its segment while the engine was reading it",
                observed=f"generation {found}",
                expected=f"generation {self._generation}",
            )

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` for every tensor of the version: read-only views, valid while they are referenced.

        A loader that keeps them until its layer is complete (vLLM's layer-wise reload) may do so without a copy. A
        loader must not write into them: the pages are mapped read-only.
        """
        for slot in self.offer.tensors:
            # Asked for every tensor: a load that was given up must not go on into the next version's time.
            if self.lost:
                raise LinkLost("its trainer went away: the data link ended in the middle of the load")
            if not self._complete:
                raise ProtocolError("the version was not verified to its end, or its session has ended")
            self.check_unchanged()
            yield slot.name, self._view(slot)

    def _view(self, slot: TensorSlot) -> torch.Tensor:
        dtype = getattr(torch, slot.dtype)
        if slot.nbytes == 0:
            return torch.empty(slot.shape, dtype=dtype)
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns about a read-only buffer; that is what we want here.
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            flat = torch.frombuffer(self._lend(slot.offset, slot.offset + slot.nbytes), dtype=dtype)
        return flat.view(slot.shape)

    def _lend(self, low: int, high: int) -> memoryview:
        """The bytes that a view is made of."""
        return self._memory.data[low:high]

    def close(self) -> None:
        """Refuse further use. The memory belongs to the link."""
        self._complete = False


class JointVersion:
    """One version of which each trainer rank has sent a share. Used like a StagedVersion that is complete."""

    def __init__(self, parts: Sequence[StagedVersion]) -> None:
        self._parts = parts
        rows = [
            (place, number, slot)
            for number, part in enumerate(parts)
            for place, slot in zip(part.offer.share.places, part.tensors, strict=True)
        ]
        rows.sort(key=lambda row: row[0])
        self._owners = [number for _, number, _ in rows]
        self.version = parts[0].version
        self.tensors: Sequence[TensorSlot] = [slot for _, _, slot in rows]

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See StagedVersion. In the order of the whole, whoever sent what."""
        views = [part.views() for part in self._parts]
        for number in self._owners:
            yield next(views[number])
        self.check_unchanged()

    def verified(self) -> list[tuple[TensorSlot, str]]:
        """See StagedVersion."""
        return [row for part in self._parts for row in part.verified()]

    def check_again(self) -> None:
        """See StagedVersion."""
        for part in self._parts:
            part.check_again()

    def check_unchanged(self) -> None:
        """See StagedVersion. A part of no tensors is looked at too."""
        for part in self._parts:
            part.check_unchanged()


def check_offer(offer: Offer) -> None:
    """Raise ProtocolError unless every tensor of an offer is consistent and inside its segment. First of all: the
    numbers come from the other process."""
    try:
        check_slots(offer.tensors, offer.segment_bytes)
        check_share(offer.share, len(offer.tensors))
    except ValueError as error:
        raise ProtocolError("an offer describes tensors that do not fit its segment", observed=str(error)) from None
