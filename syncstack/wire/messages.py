"""What is said on a data link: one trainer rank to one engine worker.

The order is fixed::

    over TCP, before all else (see ``wire/auth.py``):
                                             worker -> trainer   Challenge
    trainer -> worker   Answer               worker -> trainer   Welcome
    trainer -> worker   LinkHello            worker -> trainer   LinkHello
    per refit:
    trainer -> worker   Offer (+ the segment's fd over a unix socket, once per segment)
    trainer -> worker   Table                if the offer's handle is of ``cuda`` and the table is another than before
    trainer -> worker   Chunks (+ their fds) as often as it takes, for each new segment of the table
    trainer -> worker   Piece + its bytes    as often as it takes, if the offer's handle is ``stream``
    trainer -> worker   Join                 if the offer's handle is ``group`` and this sender has no group with it
                                             worker -> trainer   Card
    trainer -> worker   Cards
    trainer -> worker   Cast                 as often as it takes; its bytes come in the group
    trainer -> worker   BucketReady ...      as the bytes become readable
    trainer -> worker   StageEnd
                                             worker -> trainer   Staged

Fault may come instead of any message. One that names a session ends that session, at once and not at its StageEnd; what
the sender still says about it is skipped, and so are the bytes of each Piece: both sides stay in step, because a Piece
says how many follow, and a sender that gives up does so between two of them or closes the link.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from syncstack.weights.manifest import WHOLE, Share, TensorSlot

PROTOCOL_VERSION = 4

MAX_CHUNK_FDS = 253
"""Most descriptors of one frame: the kernel's own limit (SCM_MAX_FD)."""

MAX_CHUNKS = 1 << 16
"""Most chunks of GPU memory of one table. At torch's 20 MiB that is 1.3 TB."""

MAX_PIECE_BYTES = 4 << 20
"""Most bytes that follow one frame: what a side that gave up a session has still to send, or to skip."""

MAX_MEMBERS = 1024
"""Most members of a group: one sender and its workers."""

Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=8192)]
Token = Annotated[str, Meta(min_length=8, max_length=64)]
Nonce = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
U64 = Annotated[str, Meta(min_length=16, max_length=16)]
"""A 64-bit digest as 16 hex digits: msgpack integers of other languages are signed too often."""
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Rank = Annotated[int, Meta(ge=0, le=1 << 20)]
CardBytes = Annotated[bytes, Meta(max_length=1 << 14)]
"""How one member of a group is reached, as its library writes it: it grows with the number of members."""
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, tagged with the class's name, strict about fields."""


class Challenge(_Message, frozen=True, kw_only=True):
    """A worker's first frame over TCP: which worker it is, and what the trainer must prove its token over."""

    rank: Rank
    nonce: Bytes32


class Answer(_Message, frozen=True, kw_only=True):
    """The trainer's proof, and what the worker must prove its token over in its turn."""

    rank: Rank
    nonce: Bytes32
    proof: Bytes32


class Welcome(_Message, frozen=True, kw_only=True):
    """The worker's proof. From here on the link speaks as a unix socket does."""

    proof: Bytes32


class LinkHello(_Message, frozen=True, kw_only=True):
    """Who is speaking. ``nonce`` names the process for its life; pids mean nothing across namespaces."""

    role: Annotated[str, Meta(pattern="^(trainer|worker)$")]
    rank: Rank
    nonce: Token


class Handle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the receiver comes by a segment's descriptor. A kind that it does not know is refused by its name.

    ``memfd-scm``: the descriptor travels with the frame. ``memfd-pidfd``: the receiver takes descriptor ``fd`` of
    process ``pid``, which is meant as the PID namespace with inode ``pid_ns`` numbers it, and which started at
    ``start_ticks`` (field 22 of /proc/PID/stat): a number alone may be a stranger's. ``stream``: there is none; the
    bytes of the segment's data area follow over the link, from first to last. ``group``: they come, in the same order,
    from the member before this worker in the group that the sender has with its workers. ``cuda-scm``, ``cuda-pidfd``:
    the bytes lie in GPU memory, a Table says where, and descriptors travel with Chunks or are taken as they say.
    """

    kind: Name = "memfd-scm"
    pid: Annotated[int, Meta(ge=0, le=1 << 22)] = 0
    pid_ns: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    start_ticks: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    fd: Annotated[int, Meta(ge=0, le=1 << 30)] = 0


class Offer(_Message, frozen=True, kw_only=True):
    """The tensors of one version and where they lie in the sender's segment.

    The segment is handed over with the first offer that names it, as ``handle`` says; later offers name it by
    ``segment`` alone, whatever their handle says. ``segment`` is also the nonce in the segment's first page.

    With GPU memory ``segment`` names the sender, ``generation`` its table, and offsets only say how the tensors would
    lie in one piece; where they do lie is in the Table of that generation.

    With several trainer ranks each offers its ``share`` on a link of its own; they are one version to the engine, which
    takes nothing before all are there.
    """

    session: Token
    version: Count
    segment: Nonce
    segment_bytes: Count
    generation: Count
    handle: Handle = Handle()
    tensors: Annotated[tuple[TensorSlot, ...], Meta(max_length=1 << 20)]
    share: Share = WHOLE


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adjacent GPU memory of the sender, by an ``id`` that it never uses twice.

    ``chunks``: the size of each allocation in it, in order. ``ipc``: the legacy handle where it is one allocation of
    cudaMalloc; empty where each chunk has a descriptor, which Chunks hand over.
    """

    id: Count
    device: Name
    chunks: Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 48)], ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    ipc: Annotated[bytes, Meta(max_length=64)] = b""

    @property
    def nbytes(self) -> int:
        """Bytes from first to last."""
        return sum(self.chunks)


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one tensor lies: contiguous, row-major, from byte ``offset`` of the table's segment number ``segment``."""

    segment: Count
    offset: Count


class Table(_Message, frozen=True, kw_only=True):
    """All segments of one generation, and the place of each of the offer's tensors, in order. It replaces the last one:
    segments that it leaves out are of no use any more, and of the others those are new that no table had before."""

    session: Token
    generation: Count
    segments: Annotated[tuple[Segment, ...], Meta(max_length=MAX_CHUNKS)]
    places: Annotated[tuple[Place, ...], Meta(max_length=1 << 20)]


class Chunks(_Message, frozen=True, kw_only=True):
    """The next descriptors of a new segment, from chunk ``first`` on: ``count`` of them come with the frame, or are
    those that ``fds`` names in the sender's process."""

    session: Token
    segment: Count
    first: Count
    count: Annotated[int, Meta(ge=1, le=MAX_CHUNK_FDS)]
    fds: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 30)], ...], Meta(max_length=MAX_CHUNK_FDS)] = ()


class Piece(_Message, frozen=True, kw_only=True):
    """The next ``nbytes`` of the data area follow this frame on the link as they are, outside any message."""

    session: Token
    nbytes: Annotated[int, Meta(ge=1, le=MAX_PIECE_BYTES)]


class Join(_Message, frozen=True, kw_only=True):
    """Make a group of ``size`` members, as member ``place``: the sender is 0, each worker has a place of its own."""

    session: Token
    place: Annotated[int, Meta(ge=1, lt=MAX_MEMBERS)]
    size: Annotated[int, Meta(ge=2, le=MAX_MEMBERS)]


class Card(_Message, frozen=True, kw_only=True):
    """A worker's answer to Join: how the other members reach it."""

    session: Token
    card: CardBytes


class Cards(_Message, frozen=True, kw_only=True):
    """The cards of all members, in order. Each connects to every other now."""

    session: Token
    cards: Annotated[tuple[CardBytes, ...], Meta(min_length=2, max_length=MAX_MEMBERS)]


class Cast(_Message, frozen=True, kw_only=True):
    """The next ``nbytes`` of the data area come in the group."""

    session: Token
    nbytes: Annotated[int, Meta(ge=1, le=MAX_PIECE_BYTES)]


class BucketReady(_Message, frozen=True, kw_only=True):
    """Tensors ``first .. first + len(digests)`` of the offer are readable; their digests as the sender read them.

    ``readable`` is how many bytes of the data area, from its beginning, are readable beyond those: a receiver may begin
    to read a large tensor before its end is there. 0: nothing is said of it.
    """

    session: Token
    first: Count
    digests: Annotated[tuple[U64, ...], Meta(max_length=1 << 20)]
    readable: Count = 0


class StageEnd(_Message, frozen=True, kw_only=True):
    """All buckets were announced."""

    session: Token


class Staged(_Message, frozen=True, kw_only=True):
    """Every tensor was read by the worker and its digest equals the sender's. Times are seconds."""

    session: Token
    digests_equal: Count
    map_s: float
    digest_s: float


class Fault(_Message, frozen=True, kw_only=True):
    """The worker gave up a session, and the link stays open; without a session: it is about to close the link."""

    session: Annotated[str, Meta(max_length=64)]
    kind: Name
    text: Text


Message = (
    Challenge
    | Answer
    | Welcome
    | LinkHello
    | Offer
    | Table
    | Chunks
    | Piece
    | Join
    | Card
    | Cards
    | Cast
    | BucketReady
    | StageEnd
    | Staged
    | Fault
)
