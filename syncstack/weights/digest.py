"""The content digest of a tensor: XXH3-64 over its bytes, row-major, in the dtype in which they travel.

The library is xxhash: on the CPU it reads faster than memory delivers, so that a digest costs one pass over the
bytes. It is position-dependent and independent of how the bytes are cut into buckets. It finds accidents (a stale,
torn or half-written buffer), not an adversary, who would have to hold the trainer's uid anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALGORITHM = "xxh3-64"


def digest(data: Buffer) -> str:
    """Digest of a C-contiguous buffer, as 16 hex digits. Releases the interpreter lock while it reads."""
    return xxhash.xxh3_64_hexdigest(memoryview(data))


class Hasher:
    """The same digest, fed piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.update: Callable[[memoryview], None] = self._state.update
        """Adds the next bytes. The library's own method: it is called for every cache-sized piece."""

    def hexdigest(self) -> str:
        """Digest of everything so far, as 16 hex digits."""
        return self._state.hexdigest()
