"""A mapping of one segment of another process's GPU memory: gone when nobody needs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from syncstack.errors import GpuError, HandleRefused, ProtocolError
from syncstack.transports.cuda.driver import Driver
from syncstack.wire.messages import Segment

_ELSEWHERE = {"CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_DEVICE", "CUDA_ERROR_MAP_FAILED"}
"""What opening a legacy handle of a process in another PID namespace answers (201, 101, 205)."""


class Ended:
    """What ends a mapping, once: nothing on the device may read it any more, and then what made it is undone."""

    def __init__(self, driver: Driver, device: str) -> None:
        self._driver = driver
        self._device = device
        self.undo = ExitStack()

    def __call__(self) -> None:
        self._driver.settle(self._device)
        self.undo.close()


class Mapping:
    """One segment, mapped from construction until ``close`` or, if it is later, until the last tensor of it is gone."""

    def __init__(self, segment: Segment, data: torch.Tensor) -> None:
        self.segment = segment
        self._data: torch.Tensor | None = data

    @property
    def data(self) -> torch.Tensor:
        """All of it: uint8 [nbytes]. Raises ProtocolError after ``close``."""
        data = self._data
        if data is None:
            raise ProtocolError("this version's memory was given back")
        return data

    def close(self) -> None:
        """Unmap, now or when the last tensor of it is dropped."""
        self._data = None


def map_chunks(driver: Driver, segment: Segment, handles: Sequence[int], *, write: bool = False) -> tuple[int, Ended]:
    """Map a segment's chunks one after the other, each by its handle, which stays the caller's. Returns the address and
    what ends the mapping. Raises GpuError and has mapped nothing then."""
    assert len(handles) == len(segment.chunks)
    ended = Ended(driver, segment.device)
    try:
        base = at = driver.reserve(segment.nbytes)
        ended.undo.callback(driver.free, base, segment.nbytes)
        for handle, size in zip(handles, segment.chunks, strict=True):
            driver.map(at, size, handle)
            ended.undo.callback(driver.unmap, at, size)
            at += size
        driver.allow(base, segment.nbytes, segment.device, write=write)
    except BaseException:
        ended.undo.close()
        raise
    return base, ended


def view_chunks(driver: Driver, segment: Segment, handles: Sequence[int], *, write: bool = False) -> torch.Tensor:
    """uint8 [nbytes] of a segment's chunks, mapped as ``map_chunks`` does until no tensor shares it any more."""
    base, ended = map_chunks(driver, segment, handles, write=write)
    try:
        return driver.view(base, segment.nbytes, segment.device, ended)
    except BaseException:
        ended.undo.close()
        raise


class PendingSegment:
    """A segment whose descriptors are still coming. It holds their handles until it is mapped, or given up."""

    def __init__(self, driver: Driver, segment: Segment) -> None:
        self._driver = driver
        self._handles: list[int] = []
        self.segment = segment

    @property
    def come(self) -> int:
        """How many chunks have come."""
        return len(self._handles)

    def add(self, fd: int) -> None:
        """Import the next chunk; the descriptor stays the caller's. Raises GpuError."""
        self._handles.append(self._driver.import_fd(fd))

    def map(self) -> Mapping:
        """Map all chunks one after the other. Raises GpuError and has mapped nothing then."""
        data = view_chunks(self._driver, self.segment, self._handles)
        self.drop()
        return Mapping(self.segment, data)

    def drop(self) -> None:
        """Give the handles back; what is mapped stays."""
        while self._handles:
            self._driver.release(self._handles.pop())


def open_ipc(driver: Driver, segment: Segment) -> Mapping:
    """Map cudaMalloc memory by its legacy handle. Raises HandleRefused, GpuError or ProtocolError."""
    try:
        base = driver.open_ipc(segment.ipc)
    except GpuError as error:
        if error.code not in _ELSEWHERE:
            raise
        raise HandleRefused(
            "the sender's cudaMalloc memory cannot be opened from another PID namespace",
            observed=f"{error.call}: {error.code}",
            consequence="Nothing was mapped",
            next_step="share the PID namespace (Kubernetes: shareProcessNamespace), or set expandable_segments:True in "
            "the trainer's PYTORCH_CUDA_ALLOC_CONF",
        ) from None
    ended = Ended(driver, segment.device)
    ended.undo.callback(driver.close_ipc, base)
    try:
        found = driver.span(base)
        if found[0] != base or found[1] < segment.nbytes:
            raise ProtocolError(
                "a segment is larger than the memory behind its handle",
                observed=f"{segment.nbytes} bytes announced",
                expected=f"<= {found[1]}",
            )
        data = driver.view(base, segment.nbytes, segment.device, ended)
    except BaseException:
        ended.undo.close()
        raise
    return Mapping(segment, data)
