"""The Triton kernel of ``digest_gpu``: XXH3-64 of many leaves at once, one warp and one program for each; where it is
asked to, it writes what it reads to another place too.

Imported only where a digest is wanted on a GPU, because it imports triton. From the specification of XXH3 (github.com/
Cyan4973/xxHash, BSD-2-Clause), its path for more than 240 bytes, with its own secret and no seed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from syncstack.weights.digest import BLOCK_BYTES

PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
AVALANCHE = tl.constexpr(0x165667919E3779F9)
BLOCK = tl.constexpr(BLOCK_BYTES)
WORDS = tl.constexpr(BLOCK_BYTES // 8)
STRIPES = tl.constexpr(BLOCK_BYTES // 64)
"""A block is 16 stripes of 8 words. A word goes into its neighbour's sum too, so words go in pairs: [16, 4, 2]."""


@triton.jit
def _paired(words):
    """Return the even and the odd of a block's words, each [16, 4]."""
    return tl.split(tl.reshape(words, (STRIPES, 4, 2)))


@triton.jit
def _words(place):
    """Return the words at ``place``, pointers of any shape."""
    return tl.load(place).to(tl.uint64, bitcast=True)


@triton.jit
def _lanes(place):
    """Return the even and the odd of 8 words, each [4]."""
    return tl.split(tl.reshape(_words(place), (4, 2)))


@triton.jit
def _product(word):
    return (word & 0xFFFFFFFF) * (word >> 32)


@triton.jit
def _added(sum_even, sum_odd, even, odd, key_even, key_odd):
    """Return the sums with one block, [16, 4] even and odd words, added."""
    return (
        sum_even + tl.sum(_product(even ^ key_even) + odd, axis=0),
        sum_odd + tl.sum(_product(odd ^ key_odd) + even, axis=0),
    )


@triton.jit
def _scrambled(total, key):
    return (total ^ (total >> 47) ^ key) * PRIME32_1


@triton.jit
def _gathered(address, nbytes, words):
    """Return words that begin at any byte, zeros after the end. Reads no aligned word that holds none of the bytes."""
    skew = (address & 7).to(tl.int32)
    aligned = (address - skew).to(tl.pointer_type(tl.uint64)) + words
    count = tl.minimum(tl.maximum(nbytes - words * 8, 0), 8)
    low = tl.load(aligned, mask=count > 0, other=0) >> (8 * skew).to(tl.uint64)
    high = tl.load(aligned + 1, mask=count > 8 - skew, other=0) << (56 - 8 * skew).to(tl.uint64) << 8
    beyond = (8 * (8 - tl.maximum(count, 1))).to(tl.uint64)
    return (low | high) << beyond >> beyond


@triton.jit
def _kept(target, place, words, nbytes):
    """Store what is whole of the words with the indices ``place``."""
    tl.store(target + place, words, mask=place * 8 + 8 <= nbytes)


@triton.jit
def _rest_kept(target, address, nbytes, lanes):
    """Copy the bytes after the last whole word."""
    place = nbytes // 8 * 8 + lanes
    rest = tl.load(address.to(tl.pointer_type(tl.uint8)) + place, mask=place < nbytes)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + place, rest, mask=place < nbytes)


@triton.jit
def leaf_hashes(table, targets, constants, hashes, COPY: tl.constexpr, UNROLL: tl.constexpr):  # noqa: N803
    """``table``: int64 [leaves, 2], address and number of bytes of each; ``targets``: int64 [leaves], where ``COPY`` is
    set: the address that each is copied to, a multiple of 16; ``constants``: int64 [280], see ``digest_gpu.constants``;
    ``hashes``: int64 [leaves], written. The grid is [leaves], with one warp each."""
    leaf = tl.program_id(0)
    address = tl.load(table + 2 * leaf)
    nbytes = tl.load(table + 2 * leaf + 1).to(tl.int32)
    blocks = (nbytes + BLOCK - 1) // BLOCK
    words = tl.arange(0, WORDS)
    lanes = tl.arange(0, 8)
    key_even, key_odd = _paired(_words(constants + words))
    scramble_even, scramble_odd = _lanes(constants + 2 * WORDS + lanes)
    sum_even, sum_odd = _lanes(constants + 2 * WORDS + 8 + lanes)
    merge_even, merge_odd = _lanes(constants + 2 * WORDS + 16 + lanes)
    # All but the last block, by whole vectors; what that leaves over, one block at a time.
    done = tl.where(address % 16 == 0, (blocks - 1) // UNROLL * UNROLL, 0)
    data = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    target = data
    if COPY:
        target = tl.multiple_of(tl.load(targets + leaf).to(tl.pointer_type(tl.uint64)), 16)
    block = 0
    while block < done:
        for i in tl.static_range(UNROLL):
            found = _words(tl.multiple_of(data + (block + i) * WORDS, 16) + words)
            if COPY:
                tl.store(tl.multiple_of(target + (block + i) * WORDS, 16) + words, found)
            even, odd = _paired(found)
            sum_even, sum_odd = _added(sum_even, sum_odd, even, odd, key_even, key_odd)
            sum_even, sum_odd = _scrambled(sum_even, scramble_even), _scrambled(sum_odd, scramble_odd)
        block += UNROLL
    while block < blocks:
        last = block == blocks - 1
        found = _gathered(address, nbytes, block * WORDS + words)
        if COPY:
            _kept(target, block * WORDS + words, found, nbytes)
        even, odd = _paired(found)
        key_even, key_odd = _paired(_words(constants + tl.where(last, WORDS, 0) + words))
        sum_even, sum_odd = _added(sum_even, sum_odd, even, odd, key_even, key_odd)
        sum_even = tl.where(last, sum_even, _scrambled(sum_even, scramble_even))
        sum_odd = tl.where(last, sum_odd, _scrambled(sum_odd, scramble_odd))
        block += 1
    if COPY:
        _rest_kept(target, address, nbytes, lanes)
    left, right = sum_even ^ merge_even, sum_odd ^ merge_odd
    total = (blocks * BLOCK).to(tl.uint64) * PRIME64_1 + tl.sum((left * right) ^ tl.umulhi(left, right), axis=0)
    total = (total ^ (total >> 37)) * AVALANCHE
    tl.store(hashes + leaf, (total ^ (total >> 32)).to(tl.int64, bitcast=True))
