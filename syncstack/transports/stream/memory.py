"""A worker's own memory for the versions that come over its link: written by the link's thread, lent to the loader.

Anonymous pages: they cost nothing before bytes have come for them, however much a peer announces. While a version may
be read they are read-only to everybody, so a loader that writes into its views ends its process, as it would with
``host_fd``.

The memory is kept from one version to the next of its size, and a version that is still read is never written. Two
threads decide that without a lock: the loader's *borrows and then looks* at the generation, the link's *raises the
generation and then looks* for what is borrowed; whoever comes second sees the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

from syncstack.errors import TransportError
from syncstack.transports.room import check_room


class OwnMemory:
    """``data_bytes`` of memory, at least one; writable from construction until ``protect``."""

    def __init__(self, data_bytes: int) -> None:
        """Raises TransportError when it cannot be had."""
        self.data_bytes = data_bytes
        self.generation = 0
        check_room(data_bytes, side="engine")
        try:
            self._map = mmap.mmap(-1, max(1, data_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise TransportError(
                f"cannot reserve {data_bytes} bytes for the weights",
                observed=str(error),
                consequence="Nothing was received",
                next_step="raise the memory limit of the engine's container",
            ) from None
        self._lent: list[weakref.ref[memoryview]] = []

    @property
    def data(self) -> memoryview:
        """All of it; for the link's thread only."""
        return memoryview(self._map)[: self.data_bytes]

    def lend(self, low: int, high: int) -> memoryview:
        """Bytes ``low`` to ``high`` for a loader. They are in use for as long as the returned object is referenced,
        which a tensor that was made of it does. The caller looks at ``generation`` afterwards."""
        part = self.data[low:high].toreadonly()
        self._lent.append(weakref.ref(part))
        return part

    def reclaim(self) -> bool:
        """Make it writable for another version, unless something that was lent is still referenced; then False, and
        it may never be written again."""
        self.generation += 1
        if any(ref() is not None for ref in self._lent):
            return False
        self._lent.clear()
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        return True

    def protect(self) -> None:
        """Nobody writes from here on. Raises TransportError if the kernel will not have it."""
        self._protect(mmap.PROT_READ)

    def _protect(self, protection: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(self._map)), protection):
            raise TransportError(
                "the memory of the weights cannot be protected",
                observed=f"mprotect: {os.strerror(ctypes.get_errno())}",
                consequence="The engine kept its old weights",
            )

    def close(self) -> None:
        """Free it now, or when the last that was lent is dropped."""
        with contextlib.suppress(BufferError):
            self._map.close()
