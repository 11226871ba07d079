"""A data link: framed, typed messages over one connected socket, and file descriptors where it is a unix socket.
Between two frames the bytes of a Piece may follow, as they are.

A frame is an 8-byte header (magic, protocol version, length of the body) and a msgpack body. Descriptors travel by
SCM_RIGHTS with the header, so that a frame and its descriptors cannot be taken apart. Bytes that do not follow this
raise ProtocolError, and the caller closes that link only.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from syncstack.errors import DeadlineExceeded, LinkLost, LinkRefused, ProtocolError
from syncstack.facts import process_nonce
from syncstack.wire.messages import MAX_CHUNK_FDS, PROTOCOL_VERSION, Fault, LinkHello, Message

_HEADER = struct.Struct("!2sHI")
_MAGIC = b"sy"
MAX_FRAME_BYTES = 64 << 20
"""Largest body. The table of a model with a million tensors stays below it."""
MAX_FDS = MAX_CHUNK_FDS
"""Most descriptors of one frame."""
MAX_PARTS = 512
"""Most buffers that one system call sends; the kernel's own limit is 1024."""
SKIP_BYTES = 64 << 10
"""Bytes that nobody wants are read in steps of this size."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Link:
    """One end of a data link. Not thread-safe: one thread sends, one receives, and they may differ."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.passes_fds = sock.family == socket.AF_UNIX
        """Whether descriptors can travel with a frame."""
        self.proven: tuple[str, int] | None = None
        """Role and rank that the peer has proven to hold the token for; None where the kernel vouches for the peer."""
        self.peer: LinkHello | None = None
        self._ended = False

    @property
    def local_host(self) -> str:
        """This end's address, an IP literal; "" for a unix socket, or one that is closed."""
        try:
            return "" if self.passes_fds else str(self._socket.getsockname()[0])
        except OSError:
            return ""

    def fileno(self) -> int:
        """The socket's descriptor, for select; -1 when closed."""
        return self._socket.fileno()

    def send(self, message: Message, *, fds: Sequence[int] = (), deadline: float) -> None:
        """Send one frame; ``deadline`` is a time of ``time.monotonic()``. Raises LinkLost or DeadlineExceeded."""
        body = _ENCODER.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ProtocolError("message too large", observed=f"{len(body)} bytes", expected=f"<= {MAX_FRAME_BYTES}")
        view = memoryview(_HEADER.pack(_MAGIC, PROTOCOL_VERSION, len(body)) + body)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while view:
            self._wait(select.POLLOUT, deadline, f"sending {type(message).__name__}")
            try:
                sent = self._socket.sendmsg([view], rights)
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLost("the peer closed the link while it was written to", observed=str(error)) from None
            view, rights = view[sent:], []

    def send_bytes(self, parts: Sequence[memoryview], *, deadline: float) -> None:
        """Send ``parts`` (flat, of bytes) one after the other, outside any frame; a Piece has announced them.

        Raises LinkLost or DeadlineExceeded; call ``end`` then, because part of them may be on the way.
        """
        left = deque(part for part in parts if part.nbytes)
        while left:
            self._wait(select.POLLOUT, deadline, "sending weights")
            try:
                sent = self._socket.sendmsg(itertools.islice(left, MAX_PARTS))
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLost("the peer closed the link while it was sent weights", observed=str(error)) from None
            while left and sent >= left[0].nbytes:
                sent -= left.popleft().nbytes
            if sent:
                left[0] = left[0][sent:]

    def receive_bytes(self, into: memoryview, *, deadline: float) -> None:
        """Fill ``into`` (flat, of bytes) with what follows the last frame; nothing is allocated and nothing read beyond
        it. Raises LinkLost, DeadlineExceeded; the link is of no use then."""
        while into:
            self._wait(select.POLLIN, deadline, "waiting for weights")
            try:
                count = self._socket.recv_into(into)
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLost("the link broke inside the weights", observed=str(error)) from None
            if not count:
                raise LinkLost("the peer closed the link inside the weights")
            into = into[count:]

    def skip_bytes(self, nbytes: int, *, deadline: float) -> None:
        """Read what follows the last frame and throw it away. Raises as ``receive_bytes``."""
        waste = memoryview(bytearray(min(nbytes, SKIP_BYTES)))
        while nbytes:
            step = waste[: min(nbytes, SKIP_BYTES)]
            self.receive_bytes(step, deadline=deadline)
            nbytes -= len(step)

    def receive(self, *, deadline: float, max_bytes: int = MAX_FRAME_BYTES) -> tuple[Message, list[int]]:
        """Receive one frame and its descriptors (close-on-exec; the caller owns them).

        ``max_bytes`` bounds the body, for a peer that has proven nothing yet. Raises LinkLost at the end of the stream,
        ProtocolError for foreign bytes, DeadlineExceeded.
        """
        header, fds = self._read_header(deadline)
        try:
            magic, version, length = _HEADER.unpack(header)
            if magic != _MAGIC:
                raise ProtocolError("not a syncstack frame", observed=header.hex(), expected=f"{_MAGIC.hex()}...")
            if version != PROTOCOL_VERSION:
                raise ProtocolError(
                    "the peer speaks another protocol version",
                    observed=str(version),
                    expected=str(PROTOCOL_VERSION),
                    next_step="run the same syncstack release on both sides",
                )
            if length > max_bytes:
                raise ProtocolError("frame too large", observed=f"{length} bytes", expected=f"<= {max_bytes}")
            body = self._read_body(length, deadline)
            try:
                return _DECODER.decode(body), fds
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise ProtocolError("a frame does not hold a known message", observed=str(error)) from None
        except BaseException:
            close_fds(fds)
            raise

    def _read_header(self, deadline: float) -> tuple[bytes, list[int]]:
        header = b""
        fds: list[int] = []
        ancillary = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        try:
            while len(header) < _HEADER.size:
                self._wait(select.POLLIN, deadline, "waiting for a message")
                try:
                    data, control, flags, _ = self._socket.recvmsg(
                        _HEADER.size - len(header), ancillary, socket.MSG_CMSG_CLOEXEC
                    )
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise LinkLost("the link broke", observed=str(error)) from None
                fds += _received_fds(control)
                if flags & socket.MSG_CTRUNC or len(fds) > MAX_FDS:
                    raise _truncated(len(fds))
                if not data:
                    raise LinkLost("the peer closed the link")
                header += data
        except BaseException:
            close_fds(fds)
            raise
        return header, fds

    def _read_body(self, length: int, deadline: float) -> bytearray:
        body = bytearray()
        while len(body) < length:
            self._wait(select.POLLIN, deadline, "waiting for the rest of a message")
            try:
                # Read in steps: a hostile length must not allocate what never comes.
                data = self._socket.recv(min(length - len(body), 1 << 20))
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLost("the link broke inside a message", observed=str(error)) from None
            if not data:
                raise LinkLost("the peer closed the link inside a message")
            body += data
        return body

    def _wait(self, event: int, deadline: float, doing: str) -> None:
        poller = select.poll()
        try:
            poller.register(self._socket, event)
        except ValueError:
            raise LinkLost("the link is closed", observed=doing) from None
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(max(1, int(left * 1000))):
            raise DeadlineExceeded(f"nothing came of {doing} on a data link before its deadline")

    def lost(self) -> bool:
        """Whether the peer has closed its end (or died), or we ended ours. Does not block and takes no bytes."""
        if self._ended:
            return True
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLRDHUP)
        except (ValueError, OSError):
            return True
        return bool(poller.poll(0))

    def end(self) -> None:
        """Send nothing more. The peer sees the end of the stream; what it has said can still be received. May be called
        by either thread, and twice."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end; the peer sees the end of the stream. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _received_fds(control: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _truncated(num_fds: int) -> ProtocolError:
    """The kernel cuts descriptors off when there are more than we have room for, or than we may open."""
    if num_fds >= MAX_FDS:
        return ProtocolError("too many descriptors with one frame", expected=f"<= {MAX_FDS}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProtocolError(
        "a descriptor came with a frame, and this process may open no more of them",
        observed=f"RLIMIT_NOFILE {soft}",
        next_step="raise the limit (compose: ulimits: {nofile: 16384})",
    )


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors that nobody will use."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def greet(link: Link, *, role: str, rank: int, deadline: float) -> LinkHello:
    """Exchange hellos; returns the peer's and remembers it in ``link.peer``. Both sides call it first."""
    link.send(LinkHello(role=role, rank=rank, nonce=process_nonce()), deadline=deadline)
    message, fds = link.receive(deadline=deadline)
    close_fds(fds)
    expected = "worker" if role == "trainer" else "trainer"
    if isinstance(message, Fault):
        raise LinkRefused(f"the peer refused the link: {message.text}")
    if not isinstance(message, LinkHello) or message.role != expected:
        found: Any = message.role if isinstance(message, LinkHello) else type(message).__name__
        raise LinkRefused("the peer did not introduce itself", observed=str(found), expected=f"a {expected}'s hello")
    if link.proven not in (None, (message.role, message.rank)):
        raise LinkRefused(
            "the peer introduces itself as another than it proved to be",
            observed=f"{message.role} {message.rank}",
            expected="{} {}".format(*link.proven),
        )
    link.peer = message
    return message
