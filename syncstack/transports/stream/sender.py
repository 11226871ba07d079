"""The trainer's half of ``stream``: the bytes of one version go over every worker's link, from one reading of the
source.

A value that lies in host memory as it travels is digested there and sent from there; another is cast first. So the
sender holds the tensors of a few buckets and never a version. A bucket goes to all workers at once, while the next
tensors are digested; the slowest link sets the pace.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import torch

from syncstack.transports.answers import collect_answers
from syncstack.transports.host_fd.handover import FdWay
from syncstack.transports.stream.receiver import KIND
from syncstack.transports.values import ValueReader, check_going, check_shape, plain
from syncstack.weights.digest import digest
from syncstack.weights.manifest import ALIGNMENT, WHOLE, Manifest, Share, TensorSlot, Wanted, layout
from syncstack.weights.source import WeightSource
from syncstack.wire.link import Link
from syncstack.wire.messages import MAX_PIECE_BYTES, BucketReady, Handle, Offer, Piece, Staged, StageEnd

_ZEROS = memoryview(bytearray(ALIGNMENT))
"""What lies between two tensors."""

_MAX_LINKS = 1024


class _Value:
    """One tensor as it travels: its bytes, which lie in ``owner``, and their digest."""

    def __init__(self, slot: TensorSlot, value: torch.Tensor) -> None:
        check_shape(slot, value)
        if not plain(slot, value):
            with torch.no_grad():
                value = value.to(device="cpu", dtype=getattr(torch, slot.dtype)).contiguous()
        self.owner = value
        self.data = _bytes_at(value.data_ptr(), slot.nbytes) if slot.nbytes else memoryview(b"")
        self.digest = digest(self.data)


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


Bucket = list[tuple[TensorSlot, _Value]]


class StreamSender:
    """One per trainer rank. Called by the coordinator, from one thread; blocks until every worker has verified."""

    kind = KIND
    """The handle of its offers."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self._reader = ValueReader(bucket_bytes=bucket_bytes, window_bytes=2 * bucket_bytes)
        self._threads = ThreadPoolExecutor(_MAX_LINKS, "syncstack-stream")  # as many as there are links

    @property
    def cast_bytes(self) -> int:
        """See Sender."""
        return self._reader.cast_bytes

    @property
    def unpinned(self) -> str:
        """See Sender. A value goes into memory of torch's own, one at a time."""
        return ""

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
        """Move one version to every link's worker and wait until each has received and verified it.

        ``wait_s`` bounds each message and each piece (4 MiB) on a link, not the whole. ``fd_ways`` means nothing here.

        A worker that refuses ends this at once, whatever the source is doing, as with ``host_fd``; sending stops before
        the next piece, so that its link can be used again. A link on which a piece could not be sent whole is ended.
        Raises DigestMismatch, TransportError, LinkLost or DeadlineExceeded.
        """
        del fd_ways
        self._reader.await_idle(wait_s)
        manifest = layout(wanted, share)
        stop = threading.Event()
        try:
            offer = Offer(
                session=session,
                version=version,
                segment=secrets.token_hex(16),
                segment_bytes=manifest.total_bytes,
                generation=0,
                handle=Handle(kind=self.kind),
                tensors=manifest.tensors,
                share=manifest.share,
            )
            for link in links:
                link.send(offer, deadline=time.monotonic() + wait_s)
            self._prepare(links, session, wait_s)
            buckets = self._reader.buckets(source, wanted, manifest, _Value, stop)
            filling = self._reader.start(lambda: self._send(buckets, links, stop, session, wait_s))
            num = len(manifest.tensors)
            return manifest, collect_answers(links, filling, session=session, num_tensors=num, wait_s=wait_s)
        except BaseException:
            stop.set()
            self._broken()
            self._reader.release()
            raise

    def _prepare(self, links: Sequence[Link], session: str, wait_s: float) -> None:
        """What comes between the offers and the first bytes."""

    def _broken(self) -> None:
        """A version was given up: end what its thread may be waiting for."""

    def _send(
        self,
        buckets: Iterator[tuple[int, Bucket]],
        links: Sequence[Link],
        stop: threading.Event,
        session: str,
        wait_s: float,
    ) -> None:
        """Send every bucket to every worker and then say that there are no more."""
        sent = 0
        for first, bucket in buckets:
            parts, sent = _parts(bucket, sent)
            digests = tuple(value.digest for _, value in bucket)
            ready = BucketReady(session=session, first=first, digests=digests)
            self._send_bucket(parts, ready, links, stop, wait_s)
        for link in links:
            link.send(StageEnd(session=session), deadline=time.monotonic() + wait_s)

    def _send_bucket(
        self,
        parts: Sequence[memoryview],
        ready: BucketReady,
        links: Sequence[Link],
        stop: threading.Event,
        wait_s: float,
    ) -> None:
        """Send ``parts`` to every worker, and then ``ready``; they are free to change when this returns."""

        def send(link: Link) -> None:
            _send_parts(link, parts, stop, ready.session, wait_s)
            link.send(ready, deadline=time.monotonic() + wait_s)

        self._on_all(links, send, stop)

    def _on_all(self, links: Sequence[Link], send: Callable[[Link], None], stop: threading.Event) -> None:
        """Do it on all links at once; raises the first error, when nobody sends any more."""
        if len(links) == 1:
            send(links[0])
            return
        sending = [self._threads.submit(send, link) for link in links]
        done, others = wait(sending, return_when=FIRST_EXCEPTION)
        if any(each.exception() for each in done):
            stop.set()
        wait(others)
        for each in sorted(sending, key=lambda future: future not in done):
            each.result()

    def retire(self) -> None:
        """See Sender. There is no memory that a worker could still be reading."""

    def close(self) -> None:
        """End the threads."""
        self._reader.close()
        self._threads.shutdown()


def _parts(bucket: Bucket, sent: int) -> tuple[list[memoryview], int]:
    """The bytes of the data area that a bucket adds to the first ``sent``, and how many there are then. A name that
    shares its bytes with an earlier one adds none."""
    parts = []
    for slot, value in bucket:
        if slot.offset < sent or not slot.nbytes:
            continue
        padding = -slot.nbytes % ALIGNMENT
        parts += [value.data, _ZEROS[:padding]]
        sent += slot.nbytes + padding
    return parts, sent


def pieces_of(parts: Sequence[memoryview], most: int = MAX_PIECE_BYTES) -> Iterator[list[memoryview]]:
    """The same bytes in runs of ``most`` and one of the rest."""
    run, room = list[memoryview](), most
    for part in parts:
        low = 0
        while part.nbytes - low >= room:
            yield [*run, part[low : low + room]]
            low, run, room = low + room, [], most
        if low < part.nbytes:
            run.append(part[low:])
            room -= part.nbytes - low
    if run:
        yield run


def _send_parts(link: Link, parts: Sequence[memoryview], stop: threading.Event, session: str, wait_s: float) -> None:
    for piece in pieces_of(parts):
        check_going(stop)
        nbytes = sum(part.nbytes for part in piece)
        try:
            link.send(Piece(session=session, nbytes=nbytes), deadline=time.monotonic() + wait_s)
            link.send_bytes(piece, deadline=time.monotonic() + wait_s)
        except BaseException:
            link.end()  # nobody knows where the next frame would begin
            raise
