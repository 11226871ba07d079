"""The digest of ``digest``, computed where the weights lie: on a CUDA device, by one launch for all tensors.

One warp walks each leaf and leaves 8 bytes; those come to the host in one copy, and the roots are computed there. Every
byte is read once and none is written, so memory that is mapped read-only will do. On an H200 that is as fast as a copy
between two places of its memory moves bytes (``python -m bench.gpu_digest``): the kernel waits for memory, not for its
arithmetic. Triton comes with every CUDA build of torch; it is imported, and the kernel compiled (about a second, kept
in Triton's cache), at the first digest.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch

from syncstack.errors import DeadlineExceeded, UsageError
from syncstack.events import await_event
from syncstack.weights.digest import LEAF_BYTES, root

UNROLL = 4
"""Blocks of a leaf in one step. On an H200 2, 4 and 8 are equally fast; 1 is slower, with few leaves by 40 %."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip

Spans = tuple[tuple[int, int], ...]
"""Address and number of bytes of each tensor."""


def constants() -> torch.Tensor:
    """Return XXH3's numbers as the kernel reads them, int64 [280], by word of 64 bits: what the 128 words of a block
    are combined with; the same for a leaf's last block, whose last stripe has a key of its own; what the 8 sums are
    scrambled with after each block but the last, begin with, and are merged with."""
    at = [8 * (stripe + lane) for stripe in range(16) for lane in range(8)]
    last = at[:-8] + [121 + 8 * lane for lane in range(8)]
    scramble, merge = range(128, 192, 8), range(11, 75, 8)
    before, after = ([_SECRET[i : i + 8] for i in places] for places in ((*at, *last, *scramble), merge))
    packed = bytearray(b"".join(before) + struct.pack("<8Q", *_START) + b"".join(after))
    return torch.frombuffer(packed, dtype=torch.int64)


def leaf_table(spans: Spans, *, leaf_bytes: int = LEAF_BYTES) -> torch.Tensor:
    """Return address and number of bytes of every leaf, int64 [leaves, 2], tensor after tensor."""
    address, nbytes = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2).unbind(1)
    counts = (nbytes + leaf_bytes - 1) // leaf_bytes
    place = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    offset = place * leaf_bytes
    left = nbytes.repeat_interleave(counts) - offset
    return torch.stack((address.repeat_interleave(counts) + offset, left.clamp(max=leaf_bytes)), 1)


def leaf_targets(spans: Spans, places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return where every leaf of ``leaf_table(spans)`` is copied to, int64 [leaves]. Raises UsageError for places that
    are not of their tensors' sizes, or do not begin at a multiple of 16 bytes."""
    ends = tuple((place.data_ptr(), place.nbytes) for place in places)
    if [nbytes for _, nbytes in ends] != [nbytes for _, nbytes in spans] or any(address % 16 for address, _ in ends):
        raise UsageError(
            "these tensors cannot be copied to these places",
            observed=f"{sum(nbytes for _, nbytes in ends)} bytes in {len(ends)} places",
            expected=f"{sum(nbytes for _, nbytes in spans)} bytes in {len(spans)}, each at a multiple of 16 bytes",
        )
    return leaf_table(ends)[:, 0].contiguous()


def launch(
    table: torch.Tensor,
    numbers: torch.Tensor,
    *,
    targets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hash the leaves of ``table`` on the current stream, and copy each to its address of ``targets``, int64 [leaves],
    if they are given; returns the hashes, int64 [leaves], where the table is: in ``out`` if that is given."""
    from syncstack.weights.digest_kernel import leaf_hashes

    hashes = torch.empty(len(table), dtype=torch.int64, device=table.device) if out is None else out
    if len(table):
        copied, to = targets is not None, table if targets is None else targets
        leaf_hashes[(len(table),)](table, to, numbers, hashes, COPY=copied, UNROLL=UNROLL, num_warps=1)
    return hashes


def roots(spans: Spans, hashes: torch.Tensor) -> list[str]:
    """Return the digest of each tensor from the hashes of all leaves, int64 [leaves] in this (little-endian) host's
    memory."""
    leaves = ctypes.string_at(hashes.data_ptr(), hashes.nbytes)
    found, first = [], 0
    for _, nbytes in spans:
        end = first + -(-nbytes // LEAF_BYTES) * 8
        found.append(root(nbytes, leaves[first:end]))
        first = end
    return found


class PendingDigests:
    """Digests that a stream is computing. The tensors must keep memory and content until ``wait`` is over."""

    def __init__(self, spans: Spans, hashes: torch.Tensor) -> None:
        self._spans = spans
        self._hashes = torch.empty(hashes.shape, dtype=hashes.dtype, pin_memory=True)
        self._hashes.copy_(hashes, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self, *, deadline: float) -> list[str]:
        """Return a digest for each tensor, in order, as 16 hex digits. Blocks, at most until ``deadline``, a time of
        time.monotonic(); raises DeadlineExceeded then."""
        await_event(self._done, deadline=deadline, late=self._late)
        return roots(self._spans, self._hashes)

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            "the GPU did not finish the digests in time",
            observed=f"{len(self._spans)} tensors, {sum(nbytes for _, nbytes in self._spans)} bytes",
            consequence="Nothing is known of what arrived",
        )


class DeviceHasher:
    """Digests of tensors on one CUDA device. Holds 16 bytes for each leaf of the tensors it saw last: with the same
    tensors at the same places again, a digest is one launch and one copy. Not for several threads at once."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = constants().to(device)
        self._device = self._numbers.device  # with its index
        self._spans: Spans = ()
        self._ends: tuple[int, ...] | None = None
        self._targets = torch.empty(0, dtype=torch.int64, device=device)
        self._last: Sequence[torch.Tensor] = ()
        self._table = torch.empty(0, 2, dtype=torch.int64, device=device)

    def start(self, tensors: Sequence[torch.Tensor]) -> PendingDigests:
        """Start on the current stream of the device, behind what is on it, and return at once.

        Tensors of any dtype, contiguous, at any address of the device; none is written or kept. Those that begin at a
        multiple of 16 bytes are fast. New ones at first wait for what the stream has to do. A tuple that was given
        before is known to hold the same tensors at the same places. Raises UsageError.
        """
        if not (isinstance(tensors, tuple) and tensors is self._last):
            self._look_at(tensors)
            self._last = tensors
        with torch.cuda.device(self._device):
            self._table.record_stream(torch.cuda.current_stream())
            return PendingDigests(self._spans, launch(self._table, self._numbers))

    def copy(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> PendingDigests:
        """As ``start``, and copy each tensor to its place in the same pass: the digests are those of what was written.

        A place has its tensor's size, is contiguous and begins at a multiple of 16 bytes. Neither is kept. Raises
        UsageError.
        """
        self._look_at(tensors)
        self._look_where(places)
        with torch.cuda.device(self._device):
            for table in (self._table, self._targets):
                table.record_stream(torch.cuda.current_stream())
            return PendingDigests(self._spans, launch(self._table, self._numbers, targets=self._targets))

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        self._check(tensors)
        spans = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
        if spans != self._spans:
            with torch.cuda.device(self._device):
                self._table, self._spans, self._ends = leaf_table(spans).to(self._device), spans, None
        self._last = ()

    def _look_where(self, places: Sequence[torch.Tensor]) -> None:
        """After ``_look_at``."""
        ends = tuple(place.data_ptr() for place in places)
        if ends != self._ends:
            self._check(places)
            self._targets, self._ends = leaf_targets(self._spans, places).to(self._device), ends

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device != self._device or not tensor.is_contiguous():
                raise UsageError(
                    "this tensor cannot be digested as it lies",
                    observed=f"{'' if tensor.is_contiguous() else 'not '}contiguous, on {tensor.device}",
                    expected=f"contiguous, on {self._device}",
                )
