"""What the CUDA transports ask of the driver, as one small protocol: a real driver (``bound.py``), or a test's.

Addresses, handles and sizes are plain integers. A device is named by its UUID (``GPU-...``), never by an index: the
two processes of a link may number their devices differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

Kind = Literal["fd", "ipc"]
"""How memory can be shared. ``fd``: it was made by cuMemCreate with POSIX descriptors allowed, as torch's expandable
segments are. ``ipc``: it is plain cudaMalloc memory."""

IPC_BYTES = 64
"""A legacy handle."""


class Driver(Protocol):
    """Every method raises GpuError, which names the call and its CUresult, unless it says otherwise. Safe to call from
    several threads, after ``bind`` in each of them."""

    def bind(self, device: str) -> None:
        """Make the device's context current in the calling thread. Raises HandleRefused where it is not visible."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on a device. Never raises."""
        ...

    def device_of(self, tensor: torch.Tensor) -> str:
        """The device that holds a tensor."""
        ...

    def settle(self, device: str) -> None:
        """Block until the device has done everything that this process has asked of it, on whatever stream."""
        ...

    # -- the owner of the memory -------------------------------------------------------------------------------------

    def kind(self, address: int) -> Kind:
        """How the memory at an address can be shared. Raises HandleRefused for memory that cannot be."""
        ...

    def span(self, address: int) -> tuple[int, int]:
        """Base and size of the allocation at an address; of expandable segments: of one chunk."""
        ...

    def buffer_id(self, address: int) -> int:
        """A number that no other allocation of this process ever had. For memory of kind ``ipc``."""
        ...

    def retain(self, address: int) -> int:
        """The handle of the physical memory that is mapped at an address, held until ``release``. As long as it is
        held, it is the only one with its value."""
        ...

    def holds_still(self, address: int, handle: int) -> bool:
        """Whether what is mapped at an address is the memory of a handle that is held."""
        ...

    def release(self, handle: int) -> None:
        """Give a handle back. Memory that is still mapped stays."""
        ...

    def export_fd(self, handle: int) -> int:
        """A new descriptor of physical memory; the caller closes it."""
        ...

    def export_ipc(self, address: int) -> bytes:
        """The legacy handle (``IPC_BYTES``) of the allocation that begins at an address."""
        ...

    def empty(self, nbytes: int, device: str) -> torch.Tensor:
        """A new uint8 tensor [nbytes] on a device, of torch's own allocator."""
        ...

    def create(self, nbytes: int, device: str) -> tuple[int, int]:
        """New physical memory of kind ``fd``, in one piece and mapped nowhere: its handle, which is held, and its size,
        ``nbytes`` or more."""
        ...

    # -- the process that borrows it, or maps what it has created ----------------------------------------------------

    def import_fd(self, fd: int) -> int:
        """The handle of the memory behind a descriptor, which stays the caller's."""
        ...

    def reserve(self, nbytes: int) -> int:
        """A range of addresses with nothing behind it."""
        ...

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put all of a handle's memory into a reserved range."""
        ...

    def allow(self, address: int, nbytes: int, device: str, *, write: bool = False) -> None:
        """Let a device read a mapped range, and write it only if ``write`` says so."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Take away what was mapped at a range, which stays reserved."""
        ...

    def free(self, address: int, nbytes: int) -> None:
        """Give back a reserved range."""
        ...

    def open_ipc(self, handle: bytes) -> int:
        """Map the allocation behind a legacy handle; returns its first address."""
        ...

    def close_ipc(self, address: int) -> None:
        """Undo ``open_ipc``."""
        ...

    def view(self, address: int, nbytes: int, device: str, released: Callable[[], None]) -> torch.Tensor:
        """A uint8 tensor [nbytes] of what is mapped at an address. ``released`` is called, from any thread, when no
        tensor shares its memory any more, but not at the end of the process."""
        ...


Pending = Callable[[], list[str]]
"""Digests (see ``weights.digest``) that are being computed: blocks until they are known, and gives them in order."""


class Digester(Protocol):
    """Starts on the digests of contiguous tensors of one device, behind what its current stream has to do."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Pending:
        """Of tensors as they lie. They keep memory and content until the digests are known."""
        ...

    def copy(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> Pending:
        """Copy each tensor to its place, of the same size, and give the digests of what the places then hold."""
        ...


def bare(device: str) -> str:
    """A device's UUID without its prefix: the bindings give a MIG instance's as they give a GPU's."""
    return device.partition("-")[2]


def load_driver() -> Driver:
    """The real driver of this process. Raises TransportError where it, or its bindings, cannot be loaded."""
    from syncstack.transports.cuda.bound import BoundDriver

    return BoundDriver()
