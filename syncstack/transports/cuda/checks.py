"""What is asked of a sender's table before anything of it is opened: the numbers come from the other process."""

from __future__ import annotations

from collections.abc import Sequence

from syncstack.errors import ProtocolError
from syncstack.transports.cuda.driver import IPC_BYTES
from syncstack.weights.manifest import TensorSlot
from syncstack.weights.meta import DTYPE_BYTES
from syncstack.wire.messages import MAX_CHUNKS, Segment, Table

MAX_BYTES = 1 << 46
"""Most bytes of one table: more than the memory of all GPUs of a machine, less than an address space."""


def check_table(table: Table, tensors: Sequence[TensorSlot]) -> None:
    """Raise ProtocolError unless a table is consistent and holds every tensor. ``tensors`` were checked before."""
    numbers = {segment.id for segment in table.segments}
    if len(numbers) != len(table.segments):
        raise ProtocolError("a table names a segment twice")
    chunks = sum(len(segment.chunks) for segment in table.segments)
    nbytes = sum(segment.nbytes for segment in table.segments)
    if chunks > MAX_CHUNKS or nbytes > MAX_BYTES:
        raise ProtocolError(
            "a table is too large",
            observed=f"{chunks} chunks, {nbytes} bytes",
            expected=f"<= {MAX_CHUNKS} chunks, {MAX_BYTES} bytes",
        )
    for segment in table.segments:
        _check_segment(segment)
    check_places(table, tensors)


def _check_segment(segment: Segment) -> None:
    if not segment.ipc:
        return
    if len(segment.ipc) != IPC_BYTES or len(segment.chunks) != 1:
        raise ProtocolError(
            "a legacy handle cannot be what it is said to be",
            observed=f"{len(segment.ipc)} bytes for {len(segment.chunks)} allocations",
            expected=f"{IPC_BYTES} bytes for 1",
        )


def check_places(table: Table, tensors: Sequence[TensorSlot]) -> None:
    """Raise ProtocolError unless every tensor lies inside one of the table's segments, on a boundary of its dtype."""
    if len(table.places) != len(tensors):
        raise ProtocolError(
            "a table describes other tensors than were offered",
            observed=f"{len(table.places)} places",
            expected=f"{len(tensors)} tensors",
        )
    sizes = [segment.nbytes for segment in table.segments]
    for slot, place in zip(tensors, table.places, strict=True):
        if not slot.nbytes:
            continue
        if place.segment >= len(sizes) or place.offset + slot.nbytes > sizes[place.segment]:
            raise ProtocolError(
                f"{slot.name} does not lie in the memory that was offered",
                observed=f"{slot.nbytes} bytes from byte {place.offset} of segment {place.segment}",
                expected=f"inside one of {len(sizes)} segments",
            )
        if place.offset % DTYPE_BYTES[slot.dtype]:
            raise ProtocolError(f"{slot.name} is not aligned", observed=f"byte {place.offset} for {slot.dtype}")
