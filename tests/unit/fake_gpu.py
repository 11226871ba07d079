"""A fake CUDA driver, for machines without a GPU. Its memory is memfds, so that descriptors, mappings, read-only pages
and digests are the kernel's own; it keeps account of what is held, so that a leak is a number."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from syncstack.errors import GpuError, HandleRefused
from syncstack.transports.cuda.driver import Kind

CHUNK = 64 << 10
DEVICE = "GPU-fake"
PROT_NONE = 0
FIXED = 0x10
NORESERVE = 0x4000

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def mapped(address: int, nbytes: int, fd: int, protection: int) -> int:
    """mmap at an address, or anywhere for 0; fd -1: nothing behind it."""
    kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    found: int = libc.mmap(address or None, nbytes, protection, kind | (FIXED if address else 0), fd, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return found


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of mapped memory."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


@dataclass
class Physical:
    """One allocation: a memfd, and who holds it."""

    fd: int
    nbytes: int
    held: int = 0


@dataclass
class FakeGpu:
    """One process's driver. ``fail`` names calls that are refused, each once, in order of asking."""

    fail: list[str] = field(default_factory=list)
    physical: dict[int, Physical] = field(default_factory=dict)
    """By handle; one that nobody holds and nobody maps is gone."""
    at: dict[int, int] = field(default_factory=dict)
    """Handle by address of the chunk that is mapped there."""
    plain: dict[int, int] = field(default_factory=dict)
    """Bytes and buffer ids of cudaMalloc memory, by address."""
    ids: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    room: int | None = None
    """Bytes that ``create`` may give at a time."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1000))

    # -- what a test does to it: the trainer's allocator ---------------------------------------------------------------

    def expandable(self, chunks: int, *, room: int = 0) -> int:
        """Map ``chunks`` new ones in a row, as an expandable segment does; returns the address."""
        base = mapped(0, (chunks + room) * CHUNK, -1, PROT_NONE)
        for number in range(chunks):
            self.grow(base + number * CHUNK)
        return base

    def grow(self, address: int) -> None:
        """Map one new chunk at an address."""
        handle = self._made(os.memfd_create("gpu", os.MFD_CLOEXEC), CHUNK)
        os.ftruncate(self.physical[handle].fd, CHUNK)
        mapped(address, CHUNK, self.physical[handle].fd, mmap.PROT_READ | mmap.PROT_WRITE)
        self.at[address] = handle

    def shrink(self, address: int) -> None:
        """Unmap one chunk and let its memory go, as far as the trainer is concerned."""
        mapped(address, CHUNK, -1, PROT_NONE)
        self._dropped(self.at.pop(address))

    def malloc(self, nbytes: int) -> int:
        """cudaMalloc."""
        return self.malloc_at(0, nbytes)

    def malloc_at(self, address: int, nbytes: int) -> int:
        """cudaMalloc, at an address that is free; 0: anywhere."""
        base = mapped(address, nbytes, -1, mmap.PROT_READ | mmap.PROT_WRITE)
        self.plain[base], self.ids[base] = nbytes, next(self.numbers)
        return base

    @property
    def mapped(self) -> dict[int, int]:
        """Bytes by address of everything that is mapped there."""
        return {address: self.physical[handle].nbytes for address, handle in self.at.items()}

    def open_handles(self) -> int:
        """Physical memory that this process still holds or maps."""
        return len(self.physical)

    def _made(self, fd: int, nbytes: int) -> int:
        handle = next(self.numbers)
        self.physical[handle] = Physical(fd, nbytes)
        return handle

    def _dropped(self, handle: int) -> None:
        if not self.physical[handle].held and handle not in self.at.values():
            os.close(self.physical.pop(handle).fd)

    def _asked(self, call: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        if call in self.fail:
            self.fail.remove(call)
            raise GpuError(call, "CUDA_ERROR_FAKE")

    # -- the protocol --------------------------------------------------------------------------------------------------

    def bind(self, device: str) -> None:
        self._asked("bind")
        if device != DEVICE:
            raise HandleRefused("the GPU that holds the memory is not visible here", observed=DEVICE, expected=device)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._base(tensor.data_ptr()) is not None

    def device_of(self, tensor: torch.Tensor) -> str:
        return DEVICE

    def settle(self, device: str) -> None:
        self._asked("settle")

    def _base(self, address: int) -> int | None:
        sizes = {**self.mapped, **self.plain}
        bases = sorted(sizes)
        index = bisect_right(bases, address) - 1
        return bases[index] if index >= 0 and address < bases[index] + sizes[bases[index]] else None

    def kind(self, address: int) -> Kind:
        return "fd" if self._base(address) in self.at else "ipc"

    def span(self, address: int) -> tuple[int, int]:
        self._asked("span")
        base = self._base(address)
        if base is None:
            raise GpuError("cuMemGetAddressRange", "CUDA_ERROR_NOT_FOUND")
        return base, self.plain[base] if base in self.plain else self.mapped[base]

    def buffer_id(self, address: int) -> int:
        if address not in self.ids:
            raise GpuError("cuPointerGetAttribute", "CUDA_ERROR_INVALID_VALUE")
        return self.ids[address]

    def retain(self, address: int) -> int:
        self._asked("retain")
        handle = self.at.get(address)
        if handle is None:
            raise GpuError("cuMemRetainAllocationHandle", "CUDA_ERROR_INVALID_VALUE")
        self.physical[handle].held += 1
        return handle

    def holds_still(self, address: int, handle: int) -> bool:
        assert self.physical[handle].held
        return self.at.get(address) == handle

    def release(self, handle: int) -> None:
        self.physical[handle].held -= 1
        assert self.physical[handle].held >= 0
        self._dropped(handle)

    def export_fd(self, handle: int) -> int:
        self._asked("export_fd")
        return os.dup(self.physical[handle].fd)

    def export_ipc(self, address: int) -> bytes:
        return address.to_bytes(32, "little") + self.plain[address].to_bytes(32, "little")

    def empty(self, nbytes: int, device: str) -> torch.Tensor:
        return tensor_at(self.malloc(nbytes), nbytes)

    def create(self, nbytes: int, device: str) -> tuple[int, int]:
        self._asked("create")
        size = -(-nbytes // CHUNK) * CHUNK
        if self.room is not None and size > self.room:
            raise GpuError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
        handle = self._made(os.memfd_create("gpu", os.MFD_CLOEXEC), size)
        os.ftruncate(self.physical[handle].fd, size)
        self.physical[handle].held = 1
        return handle, size

    def import_fd(self, fd: int) -> int:
        self._asked("import_fd")
        handle = self._made(os.dup(fd), os.fstat(fd).st_size)
        self.physical[handle].held = 1
        return handle

    def reserve(self, nbytes: int) -> int:
        self._asked("reserve")
        base = mapped(0, nbytes, -1, PROT_NONE)
        self.reserved[base] = nbytes
        return base

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._asked("map")
        if nbytes != self.physical[handle].nbytes:
            raise GpuError("cuMemMap", "CUDA_ERROR_INVALID_VALUE")
        mapped(address, nbytes, self.physical[handle].fd, PROT_NONE)
        self.at[address] = handle

    def allow(self, address: int, nbytes: int, device: str, *, write: bool = False) -> None:
        self._asked("allow")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), protection) == 0

    def unmap(self, address: int, nbytes: int) -> None:
        mapped(address, nbytes, -1, PROT_NONE)
        self._dropped(self.at.pop(address))

    def free(self, address: int, nbytes: int) -> None:
        assert self.reserved.pop(address) == nbytes
        assert libc.munmap(address, nbytes) == 0

    def open_ipc(self, handle: bytes) -> int:
        self._asked("open_ipc")
        address = int.from_bytes(handle[:32], "little")
        self.plain[address] = int.from_bytes(handle[32:], "little")
        return address

    def close_ipc(self, address: int) -> None:
        self._asked("close_ipc")
        del self.plain[address]

    def view(self, address: int, nbytes: int, device: str, released: Callable[[], None]) -> torch.Tensor:
        array = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(array, released)
        return torch.frombuffer(array, dtype=torch.uint8)
