"""A version in host memory, verified by the worker's GPU: read over the bus once, through a small ring on the device.

For an engine on a GPU. The host's cores digest several times slower than the bus carries the bytes, and an engine has
few of them to spare; what was announced is on its way to the device while the trainer writes the next bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from syncstack.errors import DeadlineExceeded, LinkLost
from syncstack.events import await_event
from syncstack.weights.digest import LEAF_BYTES
from syncstack.weights.digest_gpu import Spans, constants, launch, leaf_table, roots
from syncstack.weights.manifest import TensorSlot

PIECE_BYTES = 16 << 20
"""One part of the ring; a multiple of LEAF_BYTES."""

RING = 4
"""Parts: one is filled while another is read, and two are in between."""


@dataclass(frozen=True)
class Piece:
    """Bytes ``low`` to ``high`` of the data area, which go to the device in one copy."""

    low: int
    high: int
    spans: Spans
    """The tensors, or the part of one, that lie in it: place in the data area, and number of bytes."""
    needs: int
    """How many tensors of the version must have been announced."""

    @property
    def num_leaves(self) -> int:
        """How many leaves it has."""
        return sum(-(-nbytes // LEAF_BYTES) for _, nbytes in self.spans)


def cut(tensors: Sequence[TensorSlot], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The pieces of a version, in order. Names that share their bytes are in them once. Pure."""
    assert piece_bytes % LEAF_BYTES == 0
    spans = list[tuple[int, int]]()
    needs = end = 0

    def piece() -> Piece:
        last, nbytes = spans[-1]
        return Piece(low=spans[0][0], high=last + nbytes, spans=tuple(spans), needs=needs)

    for number, slot in enumerate(tensors, 1):
        if not slot.nbytes or slot.offset < end:
            continue
        for low in range(slot.offset, slot.offset + slot.nbytes, piece_bytes):
            nbytes = min(piece_bytes, slot.offset + slot.nbytes - low)
            if spans and low + nbytes - spans[0][0] > piece_bytes:
                yield piece()
                spans = []
            spans.append((low, nbytes))
            needs = number
        end = slot.offset + slot.nbytes
    if spans:
        yield piece()


class ArrivingOnGpu:
    """The digests of one layout in one segment, version after version. Used from one thread at a time."""

    def __init__(self, device: torch.device, data: torch.Tensor, tensors: Sequence[TensorSlot]) -> None:
        """``data``: uint8 [bytes] on the host, page-locked. Raises torch.OutOfMemoryError."""
        self._device = device
        self._data = data
        self._pieces = list(cut(tensors))
        self._slots = tensors
        self._distinct = list(dict.fromkeys((slot.offset, slot.nbytes) for slot in tensors if slot.nbytes))
        with torch.cuda.device(device):
            self._copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._hashing = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._numbers = constants().to(device)
            self._ring = torch.empty(RING, PIECE_BYTES, dtype=torch.uint8, device=device)
            tables = [self._table(number, piece) for number, piece in enumerate(self._pieces)]
            table = torch.cat(tables) if tables else torch.empty(0, 2, dtype=torch.int64)
            self._table_by_piece = table.to(device).split([len(one) for one in tables])  # type: ignore[no-untyped-call]
            self._hashes = torch.empty(len(table), dtype=torch.int64, device=device)
            self._hashes_by_piece = self._hashes.split([len(one) for one in tables])  # type: ignore[no-untyped-call]
            self._found = torch.empty(len(table), dtype=torch.int64, pin_memory=True)
            self._read: list[Any] = [None] * RING
            torch.cuda.synchronize(device)
        self._next = 0
        self._lock = threading.Lock()
        """The engine's thread verifies again what the link's thread may have to give up meanwhile."""
        self._closed = False

    def _table(self, number: int, piece: Piece) -> torch.Tensor:
        base = self._ring[number % RING].data_ptr() - piece.low
        return leaf_table(tuple((base + low, nbytes) for low, nbytes in piece.spans))

    def begin(self) -> None:
        """Another version, or the same once more."""
        self._next = 0

    def advance(self, announced: int, readable: int = 0) -> None:
        """Start on what the first ``announced`` tensors complete, or the first ``readable`` bytes. Does not wait for
        the device. Raises LinkLost after ``close``."""
        with self._lock, torch.cuda.device(self._device):
            if self._closed:
                raise LinkLost("this version's memory was given back")
            while self._next < len(self._pieces):
                piece = self._pieces[self._next]
                if piece.needs > announced and piece.high > readable:
                    break
                self._start(self._next)
                self._next += 1

    def _start(self, number: int) -> None:
        piece, part = self._pieces[number], number % RING
        if self._read[part] is not None:
            self._copies.wait_event(self._read[part])
        with torch.cuda.stream(self._copies):
            self._ring[part, : piece.high - piece.low].copy_(self._data[piece.low : piece.high], non_blocking=True)
        self._hashing.wait_stream(self._copies)
        with torch.cuda.stream(self._hashing):
            launch(self._table_by_piece[number], self._numbers, out=self._hashes_by_piece[number])
            self._read[part] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read[part].record()

    def finish(self, *, deadline: float) -> list[str]:
        """The digest of every tensor, in order. Raises DeadlineExceeded, and LinkLost after ``close``."""
        self.advance(len(self._slots))
        with torch.cuda.device(self._device), torch.cuda.stream(self._hashing):
            self._found.copy_(self._hashes, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        await_event(done, deadline=deadline, late=self._late)
        by_place = dict(zip(self._distinct, roots(tuple(self._distinct), self._found), strict=True))
        empty = roots(((0, 0),), self._found)[0]
        return [by_place[slot.offset, slot.nbytes] if slot.nbytes else empty for slot in self._slots]

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            "the engine's GPU did not read the weights in time",
            observed=f"{len(self._pieces)} pieces of at most {PIECE_BYTES} bytes",
            consequence="Nothing is known of what arrived",
        )

    def close(self) -> None:
        """Block until the device reads the host's memory no more; it may be unmapped then."""
        with self._lock:
            self._closed = True
            self._copies.synchronize()
            self._hashing.synchronize()
            self._data = torch.empty(0, dtype=torch.uint8)
