"""What stands in a storage's handle in place of torch's own, and what lender and borrower say to each other about it.

One message is one packet of a unix socket (SOCK_SEQPACKET), with its descriptors.
"""

from __future__ import annotations

import socket
from typing import Annotated

import msgspec
from msgspec import Meta

from syncstack.errors import LinkLost, ProtocolError
from syncstack.transports.pidfd import Process
from syncstack.wire.link import close_fds
from syncstack.wire.messages import MAX_CHUNK_FDS, Nonce

MAGIC = b"syncstack-ipc-1\0"
"""How a handle of ours begins. Torch's begin with their version, a small number: one does not pass for the other."""

MAX_PACKET = 64 << 10
MAX_BYTES = 1 << 46


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a consumer comes by ``nbytes`` of a producer's GPU memory.

    ``native`` is torch's own handle, for where that works: ``pidfd`` says whether opening it takes a descriptor out of
    the producer, ``process`` and its descriptor ``fd`` let a consumer try. ``entry`` names the memory to the lender
    that listens at ``socket``.
    """

    native: bytes
    pidfd: bool
    process: Process
    fd: int
    socket: str
    entry: Nonce
    device: Annotated[str, Meta(max_length=64)]
    nbytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Want(_Message, frozen=True, kw_only=True):
    """Descriptors of the memory behind an entry, please."""

    entry: Nonce


class Copy(_Message, frozen=True, kw_only=True):
    """Its bytes in a memfd, please: descriptors of the memory itself do not help."""

    entry: Nonce


class Back(_Message, frozen=True, kw_only=True):
    """The entry is not needed any more. ``counted``: torch itself counts that consumer, the lender must not."""

    entry: Nonce
    counted: bool = False


class Lent(_Message, frozen=True, kw_only=True):
    """The next chunks, whose descriptors come along; the entry begins at byte ``offset`` of the first of all chunks."""

    sizes: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_BYTES)], ...], Meta(max_length=MAX_CHUNK_FDS)]
    offset: Annotated[int, Meta(ge=0, le=MAX_BYTES)]
    more: bool


class Copied(_Message, frozen=True, kw_only=True):
    """A memfd comes along that holds the bytes."""


class Refused(_Message, frozen=True, kw_only=True):
    """Why not."""

    text: Annotated[str, Meta(max_length=4096)]


Said = Want | Copy | Back | Lent | Copied | Refused
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_TICKETS = msgspec.msgpack.Decoder(Ticket)


def pack(ticket: Ticket) -> bytes:
    """A handle."""
    return MAGIC + _ENCODER.encode(ticket)


def unpack(handle: bytes) -> Ticket:
    """The ticket of a handle that begins with ``MAGIC``. Raises ProtocolError."""
    try:
        return _TICKETS.decode(handle[len(MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError("a handle of GPU memory is not what it begins as", observed=str(error)) from None


def say(sock: socket.socket, message: Said, fds: tuple[int, ...] = ()) -> None:
    """Send one packet. Raises LinkLost, also where the peer takes none within the socket's timeout."""
    try:
        socket.send_fds(sock, [_ENCODER.encode(message)], fds)
    except OSError as error:
        raise LinkLost("the other process of shared GPU memory went away", observed=str(error)) from None


def hear(sock: socket.socket) -> tuple[Said, list[int]]:
    """Receive one packet and its descriptors, which are the caller's. Raises LinkLost or ProtocolError."""
    try:
        data, fds, flags, _ = socket.recv_fds(sock, MAX_PACKET, MAX_CHUNK_FDS, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise LinkLost("the other process of shared GPU memory went away", observed=str(error)) from None
    try:
        if not data:
            raise LinkLost("the other process of shared GPU memory ended")
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ProtocolError("a packet was cut off", observed=f"{len(data)} bytes, {len(fds)} descriptors")
        return _DECODER.decode(data), fds
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        close_fds(fds)
        raise ProtocolError("a packet does not hold a known message", observed=str(error)) from None
    except BaseException:
        close_fds(fds)
        raise
