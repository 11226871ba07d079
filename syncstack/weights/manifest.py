"""The layout of one version in a segment, and the comparison of what is offered with what an engine holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from syncstack.errors import ManifestMismatch
from syncstack.weights.digest import digest
from syncstack.weights.meta import CASTABLE, DTYPE_BYTES, ParamMeta

ALIGNMENT = 64
"""Every tensor starts at a multiple of this: a cache line, and more than any dtype needs."""

MAX_LISTED = 10
"""How many names of each kind an error lists."""


MAX_SHARES = 64
"""Most trainer ranks that send shares of one version."""


class TensorSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies: ``offset`` bytes from the start of the segment's data area, contiguous, row-major."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 48)], ...], Meta(max_length=16)]
    offset: Annotated[int, Meta(ge=0, le=1 << 48)]
    nbytes: Annotated[int, Meta(ge=0, le=1 << 48)]


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one trainer rank sends of a version: the tensors at ``places`` in the whole, in that order.

    ``index`` of ``count``: which of the ranks that each send a share. A rank that sends everything leaves all as it is.
    """

    index: Annotated[int, Meta(ge=0, lt=MAX_SHARES)] = 0
    count: Annotated[int, Meta(ge=1, le=MAX_SHARES)] = 1
    places: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 20)], ...], Meta(max_length=1 << 20)] = ()


WHOLE = Share()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of a version in the order in which they are sent."""

    tensors: tuple[TensorSlot, ...]
    total_bytes: int
    """Length of the data area, padding between tensors included."""
    share: Share = WHOLE
    """Which tensors of the version these are."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors themselves."""
        return sum(slot.nbytes for slot in self.tensors)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that an engine expects, and the source's name for the values that belong there."""

    meta: ParamMeta
    source: str


def layout(wanted: Iterable[Wanted], share: Share = WHOLE) -> Manifest:
    """Place the tensors of a share one after the other, each aligned; names with one source share their bytes. Pure."""
    slots = []
    placed: dict[tuple[str, str], int] = {}
    end = 0
    for want in wanted:
        meta = want.meta
        offset = placed.setdefault((want.source, meta.dtype), end)
        slots.append(TensorSlot(name=meta.name, dtype=meta.dtype, shape=meta.shape, offset=offset, nbytes=meta.nbytes))
        if offset == end:
            end += -(-meta.nbytes // ALIGNMENT) * ALIGNMENT
    return Manifest(tensors=tuple(slots), total_bytes=end, share=share)


def divide(wanted: Sequence[Wanted], count: int) -> tuple[Share, ...]:
    """A share for each of ``count`` ranks, of nearly as many bytes each. Pure.

    Tensor by tensor in the order of the whole, each to the rank that has the fewest bytes so far: ranks send side by
    side while they all go through one source, so a share that is one run of it would wait for its turn. Names with one
    source stay together, because they share their bytes.
    """
    if count == 1:
        return (WHOLE,)
    load = [0] * count
    owner: dict[str, int] = {}
    places: list[list[int]] = [[] for _ in range(count)]
    for place, want in enumerate(wanted):
        if want.source not in owner:
            owner[want.source] = load.index(min(load))
            load[owner[want.source]] += want.meta.nbytes
        places[owner[want.source]].append(place)
    return tuple(Share(index=index, count=count, places=tuple(mine)) for index, mine in enumerate(places))


def part_of(wanted: Sequence[Wanted], share: Share) -> tuple[Wanted, ...]:
    """The tensors of a share."""
    return tuple(wanted) if share.count == 1 else tuple(wanted[place] for place in share.places)


def check_share(share: Share, num_tensors: int) -> None:
    """Raise ValueError unless a share is one of an offer of ``num_tensors`` tensors: places in order, once each."""
    if share.index >= share.count:
        raise ValueError(f"share {share.index} of {share.count}")
    if len(share.places) != (num_tensors if share.count > 1 else 0):
        raise ValueError(f"{len(share.places)} places for {num_tensors} tensors")
    if any(low >= high for low, high in itertools.pairwise(share.places)):
        raise ValueError("the places of a share are not in order")


def check_slots(tensors: Sequence[TensorSlot], segment_bytes: int) -> None:
    """Raise ValueError unless every slot is consistent and inside a data area of ``segment_bytes``.

    The receiver calls it before it maps anything: the numbers come from the other process.
    """
    names = set()
    for slot in tensors:
        meta = ParamMeta(name=slot.name, dtype=slot.dtype, shape=slot.shape)
        if slot.dtype not in DTYPE_BYTES:
            raise ValueError(f"{slot.name}: dtype {slot.dtype!r} may not travel")
        if slot.nbytes != meta.nbytes:
            raise ValueError(f"{slot.name}: {slot.nbytes} bytes announced, shape and dtype make {meta.nbytes}")
        if slot.offset % ALIGNMENT or slot.offset + slot.nbytes > segment_bytes:
            raise ValueError(f"{slot.name}: offset {slot.offset} + {slot.nbytes} is outside {segment_bytes} bytes")
        if slot.name in names:
            raise ValueError(f"{slot.name}: named twice")
        names.add(slot.name)


def resolve(
    source: Sequence[ParamMeta], expected: Sequence[ParamMeta], aliases: Mapping[str, str]
) -> tuple[Wanted, ...]:
    """What to send so that an engine that expects ``expected`` gets exactly that, in the source's order.

    ``aliases`` maps a tied name to the name under which ``source`` has its tensor: an engine that lists both gets
    both, from the same bytes. Values are cast to the engine's dtype where both are floating point.

    Raises ManifestMismatch that lists the first ten missing, extra, mis-shaped and mis-typed names.
    """
    wanted = {meta.name: meta for meta in expected}
    names: dict[str, list[str]] = {meta.name: [meta.name] for meta in source}
    for alias, target in aliases.items():
        if target in names:
            names[target].append(alias)
    chosen = []
    offered = []
    for meta in source:
        hits = [name for name in names[meta.name] if name in wanted]
        for name in hits or [meta.name]:
            want = wanted.get(name)
            cast = want is not None and {want.dtype, meta.dtype} <= CASTABLE
            dtype = want.dtype if want is not None and cast else meta.dtype
            offered.append(ParamMeta(name=name, dtype=dtype, shape=meta.shape))
            chosen.append(Wanted(meta=offered[-1], source=meta.name))
    compare(offered, expected)
    return tuple(chosen)


def compare(offered: Sequence[ParamMeta], expected: Sequence[ParamMeta]) -> None:
    """Exactly the expected names, shapes and dtypes, or ManifestMismatch. The engine calls it on every begin."""
    have = {meta.name: meta for meta in offered}
    wanted = {meta.name: meta for meta in expected}
    both = [(have[name], want) for name, want in wanted.items() if name in have]
    problems = {
        "missing": [name for name in wanted if name not in have],
        "extra": [name for name in have if name not in wanted],
        "shapes differ": [f"{h.name} {list(h.shape)} for {list(w.shape)}" for h, w in both if h.shape != w.shape],
        "dtypes differ": [f"{h.name} {h.dtype} for {w.dtype}" for h, w in both if h.dtype != w.dtype],
    }
    _raise_mismatch(problems, len(offered), len(expected))


def fingerprint(version: int, tensors: Iterable[ParamMeta | TensorSlot]) -> str:
    """What begin accepted, in a few characters: the worker loads an offer only if it is the same."""
    rows = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    return digest(msgspec.msgpack.encode((version, rows)))


def content_digest(tensors: Iterable[tuple[TensorSlot, str]]) -> str:
    """The digest of a version's manifest: of the name, dtype, shape and digest of each tensor. The same for the same
    weights, whatever order, shares or transport they came by."""
    rows = sorted((slot.name, slot.dtype, slot.shape, found) for slot, found in tensors)
    return digest(msgspec.msgpack.encode(rows))


def _raise_mismatch(problems: Mapping[str, Sequence[str]], num_offered: int, num_expected: int) -> None:
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            parts.append(f"{kind} ({len(names)}): {', '.join(names[:MAX_LISTED])}{more}")
    if parts:
        raise ManifestMismatch(
            "the engine holds another model than the trainer offers: " + "; ".join(parts),
            observed=f"{num_offered} tensors offered",
            expected=f"{num_expected} tensors",
            consequence="The engine goes on serving its old weights",
            next_step="start trainer and engine from the same model folder",
        )
