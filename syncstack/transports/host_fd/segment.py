"""The memory of ``host_fd``: one sealed memfd that the sender writes and every receiver maps read-only.

Layout: a header page, then the data area. The header holds a magic word, the segment's nonce, the length of the data
area, and a generation that is odd while the sender writes and even when a version is complete (the idea of a seqlock).
The seals make two promises to the receiver that no later bug can break: the file never shrinks under a mapping (no
SIGBUS), and nobody but the mapping that the sender already has can write it (F_SEAL_FUTURE_WRITE, Linux 5.1).

A memfd is not a file in /dev/shm: its size is bounded by the memory limit of the container that writes it, not by the
64 MiB that Docker gives to /dev/shm, it has no name to collide or to leave behind, and it dies with its last user.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
import struct
import threading
import warnings
from collections.abc import Callable

import torch

from syncstack.errors import TransportError
from syncstack.transports.pinned import PinnedRange, Registrar
from syncstack.transports.room import check_room

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
_MAGIC = b"SYNCSEG1"
_HEAD = struct.Struct("<8s16sQ")
_GENERATION = struct.Struct("<Q")
_GENERATION_OFFSET = 64  # a cache line of its own

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x01
F_SEAL_SHRINK = 0x02
F_SEAL_GROW = 0x04
F_SEAL_FUTURE_WRITE = 0x10
SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE


class SenderSegment:
    """The sender's end. Reused over refits: its pages are faulted in once."""

    def __init__(self, data_bytes: int) -> None:
        self.nonce = secrets.token_hex(16)
        self.data_bytes = data_bytes
        self.generation = 0
        size = HEADER_BYTES + data_bytes
        check_room(size, side="trainer", kind="shared memory")
        self.fd = os.memfd_create("syncstack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Reserve now: running out of memory must be an error here, not a SIGBUS in the middle of a copy.
            os.posix_fallocate(self.fd, 0, size)
            # Populate: one call is cheaper than a fault for each page while the first version is written.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(self.fd, size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.fd, F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(self.fd)
            raise TransportError(
                f"cannot reserve {size} bytes of shared memory for the weights",
                observed=str(error),
                consequence="Nothing was sent",
                next_step="raise the memory limit of the trainer's container",
            ) from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + HEADER_BYTES
        """Where the data area lies in this process, for as long as a view of ``data`` is held."""
        _HEAD.pack_into(self._map, 0, _MAGIC, bytes.fromhex(self.nonce), data_bytes)
        self._pinned: PinnedRange | None = None
        self.unpinned: str | None = None
        """Why it is not page-locked; "" when it is, None when nobody has asked for it."""
        self._lock = threading.Lock()

    def pin(self, make: Callable[[], Registrar]) -> None:
        """Page-lock it for a GPU, once: the first caller makes the registrar and waits, the others wait for the first.
        What hinders it is in ``unpinned`` and in one warning; the segment is as good as before, and slower."""
        with self._lock:
            if self.unpinned is not None or self.fd < 0:
                return
            try:
                size = HEADER_BYTES + self.data_bytes
                self._pinned = PinnedRange(self.address - HEADER_BYTES, size, make())
                self.unpinned = ""
            except TransportError as error:
                self.unpinned = str(error)
                log.warning("weights leave the GPU through memory that is not page-locked, which is slower: %s", error)

    def begin_write(self) -> int:
        """Mark the segment as being written; returns the generation that ``end_write`` will publish."""
        self._set_generation(self.generation + 1 + self.generation % 2)
        return self.generation + 1

    def end_write(self) -> None:
        """Mark the version as complete."""
        self._set_generation(self.generation + 1)

    def _set_generation(self, value: int) -> None:
        self.generation = value
        _GENERATION.pack_into(self._map, _GENERATION_OFFSET, value)

    @property
    def data(self) -> memoryview:
        """The writable data area. Views of it must be dropped before ``close`` can unmap."""
        return memoryview(self._map)[HEADER_BYTES:]

    def close(self) -> None:
        """Close the fd and unmap as soon as no view is left. Receivers keep what they have mapped."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
            if self._pinned is not None:
                self._pinned.close()
                self._pinned = None
        with contextlib.suppress(BufferError):
            self._map.close()


class ReceiverSegment:
    """A receiver's read-only mapping of a sender's segment; valid until ``close``, or while a view of it lives."""

    def __init__(self, fd: int, *, nonce: str, data_bytes: int) -> None:
        """Check and map ``fd``, which stays the caller's. Raises TransportError and maps nothing if it is not ours."""
        self.nonce = nonce
        self.data_bytes = data_bytes
        size = HEADER_BYTES + data_bytes
        try:
            seals = _seals(fd)
            found = os.fstat(fd).st_size
            if seals & SEALS != SEALS or found != size:
                raise _foreign(f"seals {seals:#x}, {found} bytes", f"seals {SEALS:#x}, {size} bytes")
            # Populate: as above.
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        except OSError as error:
            raise TransportError("cannot map the sender's segment", observed=str(error)) from None
        head = _HEAD.unpack_from(self._map)
        if head != (_MAGIC, bytes.fromhex(nonce), data_bytes):
            self._map.close()
            raise _foreign(f"header {head[0]!r} {head[1].hex()} {head[2]}", f"nonce {nonce}, {data_bytes} bytes")
        self._pinned: PinnedRange | None = None
        self._refused = False

    def flat(self) -> torch.Tensor:
        """The data area as uint8 [data_bytes], which must not be written. Holds the mapping."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            return torch.frombuffer(self.data, dtype=torch.uint8)

    def pin(self, make: Callable[[], Registrar]) -> bool:
        """Page-lock it for a GPU, once. Returns whether it is; what hinders it is in one warning."""
        if self._pinned is None and not self._refused and self.data_bytes:
            try:
                address = self.flat().data_ptr() - HEADER_BYTES
                self._pinned = PinnedRange(address, HEADER_BYTES + self.data_bytes, make())
            except TransportError as error:
                self._refused = True
                log.warning("weights reach the GPU through memory that is not page-locked, which is slower: %s", error)
        return self._pinned is not None

    @property
    def generation(self) -> int:
        """The sender's generation as it is now."""
        value: int = _GENERATION.unpack_from(self._map, _GENERATION_OFFSET)[0]
        return value

    @property
    def data(self) -> memoryview:
        """The read-only data area."""
        return memoryview(self._map)[HEADER_BYTES:]

    def close(self) -> None:
        """Unmap now, or when the last view is dropped. Waits for copies to a GPU that are under way."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        with contextlib.suppress(BufferError):
            self._map.close()


def _seals(fd: int) -> int:
    """A descriptor's seals; none where it is nothing that can be sealed."""
    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0
        raise


def _foreign(observed: str, expected: str) -> TransportError:
    return TransportError(
        "the descriptor is not the sender's segment",
        observed=observed,
        expected=expected,
        consequence="Nothing was mapped",
    )
