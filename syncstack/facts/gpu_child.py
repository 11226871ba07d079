"""``python -m syncstack.facts.gpu_child``: ask the CUDA driver for its devices and print them as JSON.

A process of its own, started by ``syncstack.facts.gpu``. It makes no context, so a device in exclusive-process mode is
named too, and it counts devices as the driver does under the masks of its environment.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import byref, c_char_p, c_int, c_size_t
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec

from syncstack.facts.gpu import Answer
from syncstack.facts.model import GpuDevice

# Of CUdevice_attribute in cuda.h.
_COMPUTE_MODE: Final = 20
_VMM: Final = 102
_POSIX_FD: Final = 103
_FABRIC: Final = 128
_COMPUTE_MODES: Final = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive-process"}


class _DriverError(Exception):
    """A call of the driver that failed, with its name for the error."""


class _Driver:
    """The few calls of libcuda that are needed; none of them makes a context."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib

    def call(self, name: str, *args: Any) -> None:
        """Make a call; raises _DriverError."""
        code = getattr(self._lib, name)(*args)
        if code:
            text = c_char_p()
            self._lib.cuGetErrorName(code, byref(text))
            raise _DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def number(self, name: str, *args: Any) -> int:
        """Make a call whose first argument is where it puts an int."""
        found = c_int()
        self.call(name, byref(found), *args)
        return found.value

    def attribute(self, which: int, device: int) -> int:
        """Return an attribute, 0 where the driver is too old to know it."""
        try:
            return self.number("cuDeviceGetAttribute", which, device)
        except _DriverError:
            return 0

    def uuid(self, name: str, device: int) -> str:
        """Return a device's UUID without a prefix."""
        raw = ctypes.create_string_buffer(16)
        self.call(name, raw, device)
        return str(UUID(bytes=raw.raw))


def _device(driver: _Driver, index: int, handle: int) -> GpuDevice:
    name, size = ctypes.create_string_buffer(256), c_size_t()
    driver.call("cuDeviceGetName", name, len(name), handle)
    driver.call("cuDeviceTotalMem_v2", byref(size), handle)
    whole = driver.uuid("cuDeviceGetUuid", handle)
    try:
        own = driver.uuid("cuDeviceGetUuid_v2", handle)  # of a MIG instance: its own, where the other is its GPU's
    except AttributeError:  # before 11.4
        own = whole
    return GpuDevice(
        uuid=f"GPU-{whole}",
        index=index,
        name=name.value.decode(errors="replace"),
        memory_bytes=size.value,
        compute_mode=_COMPUTE_MODES.get(driver.attribute(_COMPUTE_MODE, handle), "unknown"),
        mig=(f"MIG-{own}",) if own != whole else (),
        vmm=bool(driver.attribute(_VMM, handle)),
        posix_fd=bool(driver.attribute(_POSIX_FD, handle)),
        fabric=bool(driver.attribute(_FABRIC, handle)),
    )


def ask(lib: Any) -> Answer:
    """Return the devices that ``lib``, a loaded libcuda, counts, each with the peers it can reach."""
    driver = _Driver(lib)
    try:
        driver.call("cuInit", 0)
        handles = [driver.number("cuDeviceGet", index) for index in range(driver.number("cuDeviceGetCount"))]
        devices = [_device(driver, index, handle) for index, handle in enumerate(handles)]
        peers = [
            tuple(
                devices[other].uuid
                for other, there in enumerate(handles)
                if other != index and driver.number("cuDeviceCanAccessPeer", here, there)
            )
            for index, here in enumerate(handles)
        ]
    except _DriverError as error:
        return Answer(problem=str(error))
    return Answer(devices=tuple(msgspec.structs.replace(device, peers=peers[device.index]) for device in devices))


def _opened(node: Path) -> str:
    """Open a device file, which a container's device rules may forbid whatever its mode says; "" if it can be."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"no permission: opening {node}: {error.strerror}"
    return ""


def main(node: Path = Path("/dev/nvidiactl"), library: str = "libcuda.so.1") -> None:
    """Print the answer."""
    problem, answer = _opened(node), Answer()
    if not problem:
        try:
            answer = ask(ctypes.CDLL(library))
        except OSError as error:
            problem = f"no driver library: {error}"
    if problem:
        answer = Answer(problem=problem)
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    main()
