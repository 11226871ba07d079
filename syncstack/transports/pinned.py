"""Page-locked host memory: with it a GPU copies at the speed of its bus, and without it several times slower.

By the driver's calls and not the runtime's: a runtime call that fails leaves its error behind, and an unrelated kernel
reports it later (xcena-dev/maru#65). The driver's only answer.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from syncstack.errors import TransportError

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 30
"""Most of one call: areas of 512 GiB and more are refused by newer drivers (xcena-dev/maru#64)."""

ALREADY_REGISTERED = 712
"""CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED."""


class Registrar(Protocol):
    """What page-locking asks of the driver. Each call returns its CUresult, 0 for success. For any thread."""

    def register(self, address: int, nbytes: int) -> int:
        """cuMemHostRegister, for all contexts."""
        ...

    def unregister(self, address: int) -> int:
        """cuMemHostUnregister."""
        ...


class DriverRegistrar:
    """The real one, for one device of this process."""

    def __init__(self, index: int, *, read_only: bool = False) -> None:
        """``index`` is torch's; ``read_only`` is for pages that this process may not write. Raises TransportError where
        the driver or its bindings cannot be used."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise TransportError("cuda-bindings cannot be imported", observed=str(error)) from None
        self._driver: Any = driver
        self._flags = driver.CU_MEMHOSTREGISTER_PORTABLE
        if read_only:
            self._flags |= driver.CU_MEMHOSTREGISTER_READ_ONLY
        (code,) = driver.cuInit(0)  # torch does it at its first use of a GPU, which may be later than ours
        if not int(code):
            code, device = driver.cuDeviceGet(index)
        if not int(code):
            code, self._context = driver.cuDevicePrimaryCtxRetain(device)
        if int(code):
            raise TransportError("the GPU's context cannot be had", observed=f"CUresult {int(code)}")

    def register(self, address: int, nbytes: int) -> int:
        """See Registrar."""
        self._driver.cuCtxSetCurrent(self._context)  # torch's own: a thread of ours may have none yet
        (code,) = self._driver.cuMemHostRegister(address, nbytes, self._flags)
        return int(code)

    def unregister(self, address: int) -> int:
        """See Registrar. Waits for copies that are under way."""
        self._driver.cuCtxSetCurrent(self._context)
        (code,) = self._driver.cuMemHostUnregister(address)
        return int(code)


class PinnedRange:
    """``nbytes`` at ``address``, page-locked from construction until ``close``. Close it before it is unmapped."""

    def __init__(self, address: int, nbytes: int, registrar: Registrar) -> None:
        """Raises TransportError, with nothing registered, when the driver refuses."""
        self._registrar = registrar
        self._registered: list[int] = []
        for low in range(0, nbytes, CHUNK_BYTES):
            code = self._register(address + low, min(CHUNK_BYTES, nbytes - low))
            if code:
                self.close()
                raise TransportError(
                    "the GPU's driver does not page-lock this memory",
                    observed=f"cuMemHostRegister of {nbytes} bytes: CUresult {code}",
                )
            self._registered.append(address + low)

    def _register(self, address: int, nbytes: int) -> int:
        code = self._registrar.register(address, nbytes)
        if code == ALREADY_REGISTERED:
            # The memory is new, so this is what somebody left who unmapped without unregistering.
            self._registrar.unregister(address)
            code = self._registrar.register(address, nbytes)
        return code

    def close(self) -> None:
        """Undo it. May be called twice."""
        while self._registered:
            address = self._registered.pop()
            code = self._registrar.unregister(address)
            if code:
                log.warning("page-locked memory at %#x was not released: CUresult %d", address, code)
