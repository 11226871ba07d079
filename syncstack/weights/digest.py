"""The content digest of a tensor: a tree of XXH3-64 over its bytes, row-major, in the dtype in which they travel.

::

    bytes     leaf 0: 512 KiB | leaf 1: 512 KiB | leaf 2: the rest, then zeros up to a multiple of 1 KiB
    leaves    XXH3-64         | XXH3-64         | XXH3-64
    digest    XXH3-64 over the number of bytes and the leaves' hashes, 8 bytes each, little-endian

Leaves are cut from the tensor's first byte on, so the digest depends on the place of every byte and not on buckets or
pieces. It finds accidents (a stale, torn or half-written buffer), not an adversary, who would have to hold the
trainer's uid anyway. On the CPU it is the xxhash library, one pass; ``digest_gpu`` computes the same on a GPU, and that
is why there is a tree: XXH3 goes through its blocks of 1 KiB one after another, but sums a block's words in any order.
So a GPU reads each block at once, and thousands of leaves side by side.

Weighed: (a) plain XXH3-64: a GPU would read a tensor with one warp. (b) A polynomial in each word's place: the simplest
kernel, but no CPU library has it, and a CPU must keep up with its memory: a native module of ours. (c) *Chosen:* the
tree. Its last leaf is filled up to whole blocks: up to a whole leaf, a norm of 1152 B would cost 20 us on the CPU; not
at all, the kernel would need each of XXH3's ways with short inputs, or the rests would have to come to the host.

The leaf's size::

    KiB                                                64     128    256    512    1024
    one CPU core, 269 MB, against plain XXH3-64       +35 %  +18 %  +13 %   +8 %   +4 %
    H200, 6.2 GB in 434 tensors (a copy: 2.89 ms)     1.42   1.42   1.45   1.42   1.60 ms
    H200, 0.77 GB in 59 tensors (a copy: 0.37 ms)     0.22   0.22   0.20   0.22   0.33 ms

(The H200: ``bench/results/gpu_digest_h200.json``.) On ``host_fd`` as a whole 512 KiB costs 2 %.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALGORITHM = "xxh3-64-tree-512k"
LEAF_BYTES = 512 << 10
BLOCK_BYTES = 1024
"""XXH3's block. A leaf is hashed with zeros after it up to a multiple of this."""


def digest(data: Buffer) -> str:
    """Digest of a C-contiguous buffer, as 16 hex digits. Releases the interpreter lock while it reads."""
    hasher = Hasher()
    hasher.update(data)
    return hasher.hexdigest()


def root(nbytes: int, leaves: bytes | bytearray) -> str:
    """Digest of a tensor of ``nbytes`` bytes from its leaves' hashes, 8 bytes each, little-endian."""
    return xxhash.xxh3_64_hexdigest(nbytes.to_bytes(8, "little") + leaves)


class Hasher:
    """The same digest, fed piece by piece. Pieces that end where leaves end are a little faster."""

    def __init__(self) -> None:
        self._leaf = xxhash.xxh3_64()
        self._room = LEAF_BYTES
        self._leaves = bytearray()

    def update(self, data: Buffer) -> None:
        """Add the next bytes, a C-contiguous buffer. Releases the interpreter lock while it reads: the library does so
        in its objects' update, and not in its functions that take everything at once (seen in xxhash 3.8.2)."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view, at = view.cast("B"), 0
        while at < len(view):
            piece = view[at : at + self._room]
            self._leaf.update(piece)
            at += len(piece)
            self._room -= len(piece)
            if not self._room:
                self._leaves += self._leaf.intdigest().to_bytes(8, "little")
                self._leaf.reset()
                self._room = LEAF_BYTES

    def hexdigest(self) -> str:
        """Digest of everything so far, as 16 hex digits. More may follow."""
        begun = LEAF_BYTES - self._room
        nbytes = len(self._leaves) // 8 * LEAF_BYTES + begun
        if not begun:
            return root(nbytes, self._leaves)
        last = self._leaf.copy()
        last.update(bytes(-begun % BLOCK_BYTES))
        return root(nbytes, self._leaves + last.intdigest().to_bytes(8, "little"))
