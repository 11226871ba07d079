"""How a version is cut into pieces for the worker's GPU: every byte once, in order, each piece as soon as it can be;
and what a worker does whose GPU cannot be used. A real GPU: ``test_host_fd_gpu.py``."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncstack.errors import TransportError
from syncstack.transports.host_fd import receiver
from syncstack.transports.host_fd.h2d import cut
from syncstack.transports.host_fd.receiver import HostFdReceiver
from syncstack.transports.host_fd.segment import SenderSegment
from syncstack.transports.pinned import DriverRegistrar
from syncstack.transports.staged import StagedVersion
from syncstack.weights.digest import LEAF_BYTES
from syncstack.weights.manifest import Wanted, layout
from syncstack.weights.meta import ParamMeta
from syncstack.wire.messages import Offer

PIECE = 4 * LEAF_BYTES

SIZES = st.lists(
    st.one_of(st.integers(0, 3000), st.sampled_from([PIECE, PIECE + 1, 3 * PIECE - 5, LEAF_BYTES])), max_size=12
)


@settings(deadline=None)
@given(SIZES, st.lists(st.integers(0, 11), max_size=3))
def test_every_byte_is_in_one_piece_and_needs_no_more_than_its_tensors(sizes: list[int], tied: list[int]) -> None:
    wanted = [
        Wanted(meta=ParamMeta(name=f"{name}.{number}", dtype="uint8", shape=(size,)), source=f"w{number}")
        for number, size in enumerate(sizes)
        for name in ("a", *("b" * tied.count(number)))
    ]
    names = {want.meta.name: want for want in wanted}
    tensors = layout(names.values()).tensors
    pieces = list(cut(tensors, PIECE))
    seen = [span for piece in pieces for span in piece.spans]
    whole = {slot.offset: slot.nbytes for slot in tensors if slot.nbytes}
    assert sum(nbytes for _, nbytes in seen) == sum(whole.values())
    assert seen == sorted(seen)
    for piece in pieces:
        assert 0 < piece.high - piece.low <= PIECE
        holders = [
            number
            for number, slot in enumerate(tensors, 1)
            if slot.nbytes and slot.offset < piece.high and piece.low < slot.offset + slot.nbytes
        ]
        assert piece.needs in holders  # the first name of a tensor that has several
        for low, nbytes in piece.spans:
            (begin,) = (offset for offset, size in whole.items() if offset <= low < offset + size)
            assert (low - begin) % LEAF_BYTES == 0
            assert nbytes % LEAF_BYTES == 0 or low + nbytes == begin + whole[begin]
    assert [piece.needs for piece in pieces] == sorted(piece.needs for piece in pieces)


class Registrar:
    """A driver that page-locks everything."""

    def register(self, address: int, nbytes: int) -> int:
        return 0

    def unregister(self, address: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("locks", "said"), [(False, "memory that is not page-locked"), (True, "verified by the host's cores")]
)
def test_a_gpu_that_cannot_be_used_is_told_once_and_the_host_verifies(
    locks: bool, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver(index: int, *, read_only: bool) -> DriverRegistrar:
        raise TransportError("the GPU's context cannot be had", observed="CUresult 100")

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(receiver, "DriverRegistrar", (lambda *_, **__: Registrar()) if locks else no_driver)
    monkeypatch.setattr(receiver, "ArrivingOnGpu", no_room)
    slots = layout([Wanted(meta=ParamMeta(name="a", dtype="uint8", shape=(5000,)), source="a")])
    segment = SenderSegment(slots.total_bytes)
    ours = HostFdReceiver(device=lambda: torch.device("cuda", 0))
    with caplog.at_level(logging.WARNING):
        for version in (1, 2, 3):
            generation = segment.begin_write()
            segment.end_write()
            offer = Offer(
                session="s", version=version, segment=segment.nonce, segment_bytes=slots.total_bytes,
                generation=generation, tensors=slots.tensors,
            )  # fmt: skip
            assert type(ours.open(offer, [segment.fd])) is StagedVersion
    assert [said in record.getMessage() for record in caplog.records] == [True]
    ours.close()
    segment.close()
