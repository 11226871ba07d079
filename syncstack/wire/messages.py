"""What is said on a data link: one trainer rank to one engine worker.

The order is fixed::

    trainer -> worker   LinkHello            worker -> trainer   LinkHello
    per refit:
    trainer -> worker   Offer (+ the segment's fd, once per segment)
    trainer -> worker   BucketReady ...      as the bytes become readable
    trainer -> worker   StageEnd
                                             worker -> trainer   Staged, or Fault at any time
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from syncstack.weights.manifest import TensorSlot

PROTOCOL_VERSION = 1

Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=8192)]
Token = Annotated[str, Meta(min_length=8, max_length=64)]
Nonce = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
U64 = Annotated[str, Meta(min_length=16, max_length=16)]
"""A 64-bit digest as 16 hex digits: msgpack integers of other languages are signed too often."""
Count = Annotated[int, Meta(ge=0, le=1 << 48)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, tagged with the class's name, strict about fields."""


class LinkHello(_Message, frozen=True, kw_only=True):
    """Who is speaking. ``nonce`` names the process for its life; pids mean nothing across namespaces."""

    role: Annotated[str, Meta(pattern="^(trainer|worker)$")]
    rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    nonce: Token


class Offer(_Message, frozen=True, kw_only=True):
    """The tensors of one version and where they lie in the sender's segment.

    The fd of the segment travels with the first offer that names it; later offers name it by ``segment`` alone.
    """

    session: Token
    version: Count
    segment: Nonce
    segment_bytes: Count
    generation: Count
    tensors: Annotated[tuple[TensorSlot, ...], Meta(max_length=1 << 20)]


class BucketReady(_Message, frozen=True, kw_only=True):
    """Tensors ``first .. first + len(digests)`` of the offer are written; their digests as the sender read them."""

    session: Token
    first: Count
    digests: Annotated[tuple[U64, ...], Meta(max_length=1 << 20)]


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
    """The worker gave up this session; the link stays open unless the text says otherwise."""

    session: Annotated[str, Meta(max_length=64)]
    kind: Name
    text: Text


Message = LinkHello | Offer | BucketReady | StageEnd | Staged | Fault
