"""How a version is cut into pieces for the worker's GPU: every byte once, in order, each piece as soon as it can be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from syncstack.transports.host_fd.h2d import cut
from syncstack.weights.digest import LEAF_BYTES
from syncstack.weights.manifest import Wanted, layout
from syncstack.weights.meta import ParamMeta

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
