"""The sender's table: which allocations hold the tensors of a version, kept from one refit to the next.

A tensor's address alone says nothing: the allocator may have freed its memory and mapped other memory in its place. So
the table holds the handle of every chunk that it has shown to a worker. While it is held, the physical memory behind it
is not given to anybody else and no other memory has its handle, so that one look at what is mapped there now tells
whether it is still the same. Memory of cudaMalloc has a number of its own instead, which the driver never gives twice;
the sender holds its tensors, because memory that a worker has open may not be freed.
"""

from __future__ import annotations

import itertools
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import torch

from syncstack.errors import GpuError, HandleRefused
from syncstack.transports.cuda.driver import Driver, Kind
from syncstack.wire.messages import Place, Segment


class Chunk:
    """One allocation of this process, as the driver names it."""

    def __init__(self, driver: Driver, address: int, device: str) -> None:
        """Take hold of the allocation at ``address``."""
        self.driver = driver
        self.device = device
        self.kind: Kind = driver.kind(address)
        self.base, self.size = driver.span(address)
        self.end = self.base + self.size
        self.name = driver.retain(self.base) if self.kind == "fd" else driver.buffer_id(self.base)

    def same(self) -> bool:
        """Whether the memory at this address is still this one."""
        if self.kind == "fd":
            return self.driver.holds_still(self.base, self.name)
        try:
            return self.driver.buffer_id(self.base) == self.name and self.driver.span(self.base)[1] == self.size
        except GpuError:  # nothing is there
            return False

    def release(self) -> None:
        """Let its memory go."""
        if self.kind == "fd":
            self.driver.release(self.name)


class OwnSegment:
    """A run of adjacent chunks and what a worker is told of it."""

    def __init__(self, chunks: Sequence[Chunk], number: int) -> None:
        first = chunks[0]
        self.chunks = tuple(chunks)
        self.base = first.base
        self.told = Segment(
            id=number,
            device=first.device,
            chunks=tuple(chunk.size for chunk in chunks),
            ipc=first.driver.export_ipc(first.base) if first.kind == "ipc" else b"",
        )


class OwnTable:
    """The table of one sender. ``kinds`` is what it may hand out. Used from one thread."""

    def __init__(self, driver: Driver, kinds: frozenset[Kind]) -> None:
        self.nonce = secrets.token_hex(16)
        self.generation = 0
        self.segments: tuple[OwnSegment, ...] = ()
        self.places: tuple[Place, ...] = ()
        self._driver = driver
        self._kinds = kinds
        self._seen: list[tuple[int, int]] = []
        self._chunks: dict[int, Chunk] = {}
        self._numbers = itertools.count(1)

    def update(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Describe where ``tensors`` (contiguous) lie now; returns whether that is another table than before, with
        another generation then. Raises GpuError or HandleRefused, and the table is empty then."""
        seen = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        gone = {base for base, chunk in self._chunks.items() if not chunk.same()}
        if seen == self._seen and not gone:
            return False
        try:
            self._rebuild(tensors, seen, gone)
        except BaseException:
            self.clear()
            raise
        self._seen = seen
        return True

    def _rebuild(self, tensors: Sequence[torch.Tensor], seen: Sequence[tuple[int, int]], gone: set[int]) -> None:
        kept = {base: chunk for base, chunk in self._chunks.items() if base not in gone}
        old = {segment.chunks: segment for segment in self.segments}
        used = dict[int, Chunk]()
        fresh = list[Chunk]()
        try:
            for tensor, (address, nbytes) in zip(tensors, seen, strict=True):
                for chunk in self._covering(tensor, address, nbytes, kept, used, fresh):
                    used[chunk.base] = chunk
            runs = list(_runs(used))
            segments = tuple(old.get(run) or OwnSegment(run, next(self._numbers)) for run in runs)
        except BaseException:
            for chunk in fresh:
                chunk.release()
            raise
        for base, chunk in self._chunks.items():
            if used.get(base) is not chunk:
                chunk.release()
        self._chunks, self.segments = used, segments
        self.places = tuple(_places(segments, seen))
        self.generation += 1

    def _covering(
        self,
        tensor: torch.Tensor,
        address: int,
        nbytes: int,
        kept: Mapping[int, Chunk],
        used: dict[int, Chunk],
        fresh: list[Chunk],
    ) -> Iterator[Chunk]:
        """The chunks that hold a tensor's bytes, from first to last."""
        at = address
        while at < address + nbytes:
            base = self._driver.span(at)[0]
            chunk = used.get(base) or kept.get(base)
            if chunk is None:
                chunk = Chunk(self._driver, at, self._driver.device_of(tensor))
                fresh.append(chunk)
                self._check(chunk)
            yield chunk
            at = chunk.end

    def _check(self, chunk: Chunk) -> None:
        if chunk.kind in self._kinds:
            return
        if chunk.kind == "ipc":
            raise HandleRefused(
                "the weights lie in plain cudaMalloc memory now, which has no descriptor",
                observed=f"memory at {chunk.base:#x} was made by cuMemCreate before",
                expected="memory of expandable segments",
                consequence="Nothing was sent",
                next_step="run the refit again: it copies them first",
            )
        raise HandleRefused(
            "the weights lie in expandable segments, which have no legacy handle",
            observed=f"memory at {chunk.base:#x} was made by cuMemCreate",
            expected="memory of cudaMalloc",
            consequence="Nothing was sent",
            next_step="use cuda_fd, or set expandable_segments:False in the trainer's PYTORCH_CUDA_ALLOC_CONF",
        )

    def clear(self) -> None:
        """Let all memory go; what is described next is new to every worker."""
        for chunk in self._chunks.values():
            chunk.release()
        self._chunks, self._seen, self.segments, self.places = {}, [], (), ()


def _runs(chunks: Mapping[int, Chunk]) -> Iterator[tuple[Chunk, ...]]:
    """Chunks with descriptors that lie one after the other, together; an allocation of cudaMalloc by itself."""
    run: list[Chunk] = []
    for base in sorted(chunks):
        chunk = chunks[base]
        last = run[-1] if run else None
        if last and (last.end, last.kind, last.device) == (base, "fd", chunk.device) and chunk.kind == "fd":
            run.append(chunk)
            continue
        if run:
            yield tuple(run)
        run = [chunk]
    if run:
        yield tuple(run)


def _places(segments: Sequence[OwnSegment], seen: Sequence[tuple[int, int]]) -> Iterator[Place]:
    holder = {chunk.base: index for index, segment in enumerate(segments) for chunk in segment.chunks}
    bases = sorted(holder)
    for address, nbytes in seen:
        if not nbytes:
            yield Place(segment=0, offset=0)  # an empty tensor lies nowhere
            continue
        index = holder[bases[bisect_right(bases, address) - 1]]
        yield Place(segment=index, offset=address - segments[index].base)
