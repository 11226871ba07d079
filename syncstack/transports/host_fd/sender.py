"""The trainer's half of ``host_fd``: write one version into the segment once, tell every worker as it grows.

Digest and copy are one pass in cache-sized pieces, so the sender reads its weights from memory once and writes them
once; the workers digest a bucket while the sender fills the next.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from syncstack.errors import DigestMismatch, ProtocolError, TransportError
from syncstack.transports.host_fd.segment import SenderSegment
from syncstack.weights.digest import Hasher, digest
from syncstack.weights.manifest import Manifest, TensorSlot, Wanted, layout
from syncstack.weights.source import WeightSource
from syncstack.wire.link import Link, close_fds
from syncstack.wire.messages import BucketReady, Fault, Offer, Staged, StageEnd

PIECE_BYTES = 256 << 10
"""Copy and digest in pieces of this size: source and target of one fit a common second-level cache."""


class HostFdSender:
    """One per trainer rank. Called by the coordinator, from one thread; blocks until every worker has verified."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._segment: SenderSegment | None = None
        self._known: dict[Link, str] = {}
        self.cast_bytes = 0

    def stage(
        self,
        source: WeightSource,
        wanted: Sequence[Wanted],
        links: Sequence[Link],
        *,
        session: str,
        version: int,
        deadline: float,
    ) -> tuple[Manifest, list[Staged]]:
        """Move one version to every link's worker and wait until each has read and verified it.

        Raises DigestMismatch, TransportError, LinkLost or DeadlineExceeded; the segment must then be retired,
        because a worker may still be reading it.
        """
        manifest = layout(wanted)
        segment = self._ensure_segment(manifest.total_bytes)
        generation = segment.begin_write()
        for link in links:
            self._offer(link, segment, manifest, session, version, generation, deadline)
        for first, digests in self._fill(segment, source, wanted, manifest):
            for link in links:
                link.send(BucketReady(session=session, first=first, digests=digests), deadline=deadline)
        segment.end_write()
        for link in links:
            link.send(StageEnd(session=session), deadline=deadline)
        return manifest, [self._await_staged(link, session, len(manifest.tensors), deadline) for link in links]

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
        tensors = iter(source)
        self.cast_bytes = 0
        first, filled, digests = 0, 0, list[str]()
        previous = None
        for index, (want, slot) in enumerate(zip(wanted, manifest.tensors, strict=True)):
            if want.source != previous:
                value = _next_tensor(tensors, want.source)
                if str(value.dtype) != f"torch.{slot.dtype}":
                    self.cast_bytes += value.numel() * value.element_size()
                found = _write(area, segment.data, slot, value)
                filled += slot.nbytes
                previous = want.source
            digests.append(found)
            if filled >= self._bucket_bytes:
                yield first, tuple(digests)
                first, filled, digests = index + 1, 0, []
        if digests:
            yield first, tuple(digests)

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

    def forget(self, link: Link) -> None:
        """Drop what is known about a link that was closed."""
        self._known.pop(link, None)

    def retire(self) -> None:
        """Give up the segment: the next refit gets fresh memory, and a worker that still reads this one is safe."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._known.clear()


def _next_tensor(tensors: Iterator[tuple[str, torch.Tensor]], name: str) -> torch.Tensor:
    for found, tensor in tensors:
        if found == name:
            return tensor.detach()
    raise TransportError(
        "the weight source does not give what its metadata announced",
        expected=name,
        consequence="The refit was not started on the engine's weights",
    )


def _write(area: torch.Tensor, data: memoryview, slot: TensorSlot, value: torch.Tensor) -> str:
    """Cast and copy one tensor into its slot; returns the digest of its bytes as they travel."""
    if tuple(value.shape) != slot.shape:
        raise TransportError(
            f"{slot.name} changed its shape since its metadata was read",
            observed=str(list(value.shape)),
            expected=str(list(slot.shape)),
        )
    if slot.nbytes == 0:
        return digest(b"")
    begin, end = slot.offset, slot.offset + slot.nbytes
    target = area[begin:end].view(getattr(torch, slot.dtype))
    if value.is_contiguous() and value.device.type == "cpu" and value.dtype is target.dtype:
        return _copy_and_digest(target, value.reshape(-1))
    target.view(slot.shape).copy_(value)
    return digest(data[begin:end])


def _copy_and_digest(target: torch.Tensor, source: torch.Tensor) -> str:
    """Copy equal, contiguous host tensors in cache-sized pieces, each digested as it is read from the source.

    memmove and not torch's copy: the latter starts all of torch's threads for every piece, and on busy cores the
    slowest of them sets the pace, while the worker's digest wants the other core anyway.
    """
    hasher = Hasher()
    raw = memoryview(source.view(torch.uint8).numpy())  # type: ignore[arg-type]
    to, at = target.data_ptr(), source.data_ptr()
    for low in range(0, len(raw), PIECE_BYTES):
        piece = raw[low : low + PIECE_BYTES]
        ctypes.memmove(to + low, at + low, len(piece))
        hasher.update(piece)
    return hasher.hexdigest()
