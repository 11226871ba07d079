"""Memory of the sender's own that can be handed over, for values that have none: plain cudaMalloc memory, a cast, a
gathered shard, a tensor on the host.

In large pieces, each one descriptor (or handle) and one mapping in the worker. A value has its place from one refit to
the next, so the table that the workers know stays as it is.
"""

from __future__ import annotations

import torch

from syncstack.errors import GpuError, TransportError
from syncstack.transports.cuda.driver import Driver, Kind
from syncstack.transports.cuda.mapping import view_chunks
from syncstack.weights.manifest import TensorSlot
from syncstack.wire.messages import Segment

BLOCK_BYTES = 128 << 20
"""One piece. Larger tensors have one to themselves; 61 GB are 460 pieces."""

ALIGN = 256
"""As cudaMalloc and torch's allocator align."""

_FULL = "CUDA_ERROR_OUT_OF_MEMORY"


class Arena:
    """Places by name. Used from one thread."""

    def __init__(self, driver: Driver, kinds: frozenset[Kind]) -> None:
        """``kinds`` is what the pieces may be: ``fd`` if that is among them."""
        self._driver = driver
        self._by_fd = "fd" in kinds
        self._places: dict[str, torch.Tensor] = {}
        self._room: dict[str, torch.Tensor] = {}

    def place(self, slot: TensorSlot, dtype: torch.dtype, device: str, *, total: int) -> torch.Tensor:
        """Where a slot's value on a device goes to, of the slot's shape; the same memory as long as the size is the
        same. ``total`` is the most that may ever be asked for. Valid while it is referenced. Raises GpuError, or
        TransportError where the device is full."""
        place = self._places.get(slot.name)
        if place is not None and place.dtype == dtype and place.shape == slot.shape:
            return place
        if place is None or place.nbytes != slot.nbytes:
            self._places.pop(slot.name, None)
            place = self._cut(slot.nbytes, device, total)
        place = self._places[slot.name] = place.view(-1).view(dtype).view(slot.shape)
        return place

    def _cut(self, nbytes: int, device: str, total: int) -> torch.Tensor:
        whole = -(-nbytes // ALIGN) * ALIGN
        room = self._room.get(device)
        if room is None or room.nbytes < whole:
            room = self._block(max(whole, min(BLOCK_BYTES, total)), device)
        self._room[device] = room[whole:]
        return room[:nbytes]

    def _block(self, nbytes: int, device: str) -> torch.Tensor:
        self._driver.bind(device)
        try:
            return self._mapped(nbytes, device) if self._by_fd else self._driver.empty(nbytes, device)
        except (GpuError, torch.OutOfMemoryError) as error:
            if isinstance(error, GpuError) and error.code != _FULL:
                raise
            raise _full(nbytes, device) from None

    def _mapped(self, nbytes: int, device: str) -> torch.Tensor:
        driver = self._driver
        handle, size = driver.create(nbytes, device)
        try:
            return view_chunks(driver, Segment(id=0, device=device, chunks=(size,)), [handle], write=True)
        finally:
            driver.release(handle)  # what is mapped holds it from here on

    def clear(self) -> None:
        """Forget all places; the memory goes with the last tensor of it."""
        self._places, self._room = {}, {}


def _full(nbytes: int, device: str) -> TransportError:
    return TransportError(
        "the GPU has no room for the copy that weights need which cannot be handed over as they lie",
        observed=f"{nbytes} more bytes on {device}",
        consequence="Nothing was sent",
        next_step="set expandable_segments:True in the trainer's PYTORCH_CUDA_ALLOC_CONF, so that no copy is made; or "
        "SYNCSTACK_TRANSPORT=cuda_ipc,host_fd",
    )
