"""The real driver, by NVIDIA's own bindings (``cuda.bindings``, which torch's CUDA builds bring)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any
from uuid import UUID

import torch

from syncstack.errors import GpuError, HandleRefused, TransportError
from syncstack.transports.cuda.driver import Kind, bare

_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, as a bit of an allocation's allowed handle types


class BoundDriver:
    """See Driver. Contexts are the devices' primary ones, which torch uses too."""

    def __init__(self) -> None:
        """Raises TransportError where the bindings or the driver are missing."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise TransportError(
                "the CUDA driver's bindings cannot be loaded",
                observed=str(error),
                consequence="Nothing was shared",
                next_step="install a CUDA build of torch, which brings cuda-bindings",
            ) from None
        self._cu: Any = driver
        self._fd_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._call("cuInit", 0)
        self._names = {index: self._uuid(index) for index in range(self._call("cuDeviceGetCount"))}
        self._ordinals = {bare(name): index for index, name in self._names.items()}
        self._contexts: dict[int, Any] = {}
        self._access: dict[int, Any] = {}

    def _call(self, name: str, *args: Any) -> Any:
        code, *found = getattr(self._cu, name)(*args)
        if int(code):
            raise GpuError(name, getattr(code, "name", str(code)))
        return found[0] if len(found) == 1 else tuple(found)

    def _uuid(self, index: int) -> str:
        raw = self._call("cuDeviceGetUuid", self._call("cuDeviceGet", index)).bytes
        return f"GPU-{UUID(bytes=bytes(raw))}"

    def _ordinal(self, device: str) -> int:
        found = self._ordinals.get(bare(device))
        if found is None:
            raise HandleRefused(
                "the GPU that holds the memory is not visible here",
                observed=", ".join(self._names.values()) or "none",
                expected=device,
                consequence="Nothing was mapped",
                next_step="give both containers the same devices (NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)",
            )
        return found

    def bind(self, device: str) -> None:
        """See Driver."""
        index = self._ordinal(device)
        if index not in self._contexts:
            self._contexts[index] = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", index))
        self._call("cuCtxSetCurrent", self._contexts[index])

    def holds(self, tensor: torch.Tensor) -> bool:
        """See Driver."""
        return tensor.device.type == "cuda"

    def device_of(self, tensor: torch.Tensor) -> str:
        """See Driver."""
        return self._names[tensor.device.index]

    def settle(self, device: str) -> None:
        """See Driver."""
        self.bind(device)
        self._call("cuCtxSynchronize")

    def _attribute(self, name: str, address: int) -> Any:
        return self._call(
            "cuPointerGetAttribute", getattr(self._cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"), address
        )

    def kind(self, address: int) -> Kind:
        """See Driver."""
        if int(self._attribute("ALLOWED_HANDLE_TYPES", address)) & _POSIX_FD and self._mapped(address):
            return "fd"
        if self._attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address):
            return "ipc"
        raise HandleRefused(
            "this GPU memory cannot be shared with another process",
            observed=f"memory at {address:#x}: allowed handle types {self._attribute('ALLOWED_HANDLE_TYPES', address)}",
            expected="memory of cudaMalloc, or of cuMemCreate with POSIX descriptors",
            consequence="Nothing was sent",
            next_step="let torch's native allocator hold the weights (not cudaMallocAsync, not managed memory)",
        )

    def _mapped(self, address: int) -> bool:
        """Whether a handle stands behind an address. A stream-ordered pool allows descriptors too, of the pool."""
        code, *found = self._cu.cuMemRetainAllocationHandle(address)
        if not int(code):
            self._call("cuMemRelease", found[0])
        return not int(code)

    def span(self, address: int) -> tuple[int, int]:
        """See Driver."""
        base, size = self._call("cuMemGetAddressRange", address)
        return int(base), int(size)

    def buffer_id(self, address: int) -> int:
        """See Driver."""
        return int(self._attribute("BUFFER_ID", address))

    def retain(self, address: int) -> int:
        """See Driver."""
        return int(self._call("cuMemRetainAllocationHandle", address))

    def holds_still(self, address: int, handle: int) -> bool:
        """See Driver. Asked for every chunk before every refit."""
        code, found = self._cu.cuMemRetainAllocationHandle(address)
        if int(code):
            return False
        self._cu.cuMemRelease(found)
        return int(found) == handle

    def release(self, handle: int) -> None:
        """See Driver."""
        self._call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        """See Driver."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0))

    def export_ipc(self, address: int) -> bytes:
        """See Driver."""
        return bytes(self._call("cuIpcGetMemHandle", address).reserved)

    def empty(self, nbytes: int, device: str) -> torch.Tensor:
        """See Driver."""
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._ordinal(device)))

    def create(self, nbytes: int, device: str) -> tuple[int, int]:
        """See Driver."""
        cu = self._cu
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self._ordinal(device)
        prop.requestedHandleTypes = self._fd_type
        least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(self._call("cuMemGetAllocationGranularity", prop, least))
        size = -(-nbytes // step) * step
        return int(self._call("cuMemCreate", size, prop, 0)), size

    def import_fd(self, fd: int) -> int:
        """See Driver."""
        return int(self._call("cuMemImportFromShareableHandle", fd, self._fd_type))

    def reserve(self, nbytes: int) -> int:
        """See Driver."""
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """See Driver."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int, device: str, *, write: bool = False) -> None:
        """See Driver."""
        access, flags = self._cu.CUmemAccessDesc(), self._cu.CUmemAccess_flags
        access.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._ordinal(device)
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if write else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """See Driver."""
        self._call("cuMemUnmap", address, nbytes)

    def free(self, address: int, nbytes: int) -> None:
        """See Driver."""
        self._call("cuMemAddressFree", address, nbytes)

    def open_ipc(self, handle: bytes) -> int:
        """See Driver."""
        found = self._cu.CUipcMemHandle()
        found.reserved = handle
        flags = self._cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", found, flags))

    def close_ipc(self, address: int) -> None:
        """See Driver."""
        self._call("cuIpcCloseMemHandle", address)

    def view(self, address: int, nbytes: int, device: str, released: Callable[[], None]) -> torch.Tensor:
        """See Driver."""
        array = _Array(address, nbytes)
        ended = weakref.finalize(array, _quietly, released)
        ended.atexit = False  # the process's end frees everything, and the driver may be gone by then
        return torch.as_tensor(array, device=torch.device("cuda", self._ordinal(device)))


def _quietly(released: Callable[[], None]) -> None:
    with contextlib.suppress(GpuError):  # a context that broke has lost its mappings too
        released()


class _Array:
    """What torch makes a tensor of, and keeps as long as the tensor's memory is used."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),  # torch has no read-only tensors; the mapping itself is read-only
            "version": 3,
        }
