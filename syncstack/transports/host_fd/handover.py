"""How a segment's descriptor gets from the sender to the receiver: with the frame (``scm``), or fetched (``pidfd``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from syncstack.errors import HandleRefused, ProtocolError, TransportError
from syncstack.transports import pidfd
from syncstack.wire.link import Link
from syncstack.wire.messages import Handle

FdWay = Literal["scm", "pidfd"]
"""``scm`` needs a unix socket; ``pidfd`` one PID namespace and the kernel's leave, and works over any link."""

_SCM, _PIDFD = "memfd-scm", "memfd-pidfd"


def default_way(link: Link) -> FdWay:
    """The way that a link allows, the best first."""
    return "scm" if link.passes_fds else "pidfd"


def give(fd: int, way: FdWay, link: Link) -> tuple[Handle, tuple[int, ...]]:
    """The sender's half: what an offer says, and the descriptors that go with it. ``fd`` must stay open until the
    receiver has answered. Raises TransportError when this process cannot give it that way."""
    if way == "pidfd":
        own = pidfd.myself()
        handle = Handle(kind=_PIDFD, pid=own.pid, pid_ns=own.pid_ns, start_ticks=own.start_ticks, fd=fd)
        return handle, ()
    if not link.passes_fds:
        raise TransportError("a descriptor cannot travel over TCP", next_step="share a folder, or a PID namespace")
    return Handle(kind=_SCM), (fd,)


@contextmanager
def taken(handle: Handle, fds: Sequence[int]) -> Iterator[int]:
    """The receiver's half: the descriptor, unchecked, for the length of the block. ``fds`` came with the frame and stay
    the caller's. Raises HandleRefused or ProtocolError."""
    if handle.kind == _SCM:
        if len(fds) != 1:
            raise ProtocolError("a new segment without its descriptor", observed=f"{len(fds)} fds", expected="1")
        yield fds[0]
    elif handle.kind == _PIDFD:
        process = pidfd.Process(pid=handle.pid, pid_ns=handle.pid_ns, start_ticks=handle.start_ticks)
        fd = pidfd.take(process, handle.fd)
        try:
            yield fd
        finally:
            os.close(fd)
    else:
        raise HandleRefused(
            f"memory of kind {handle.kind!r} is not known to this worker",
            expected=f"{_SCM} or {_PIDFD}",
            consequence="Nothing was opened",
            next_step="run the same syncstack release on both sides",
        )
