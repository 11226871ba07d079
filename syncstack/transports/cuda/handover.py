"""How the descriptors of GPU memory get from the sender to its workers: with frames (``scm``), or fetched (``pidfd``).

In batches: the workers import one while the sender exports the next. On an H200 the driver takes 0.16 ms to export a
descriptor, and as long again to close the last copy of it. So the sender keeps its own open until its workers are done,
where it may open so many, and closes them when nobody waits; one whose descriptors are fetched has to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from syncstack.errors import ProtocolError, TransportError
from syncstack.transports import pidfd
from syncstack.transports.cuda.room import check_descriptors
from syncstack.transports.cuda.table import OwnSegment
from syncstack.transports.host_fd.handover import FdWay
from syncstack.wire.link import Link, close_fds
from syncstack.wire.messages import Chunks, Handle

SCM, PIDFD = "cuda-scm", "cuda-pidfd"
KINDS = frozenset({SCM, PIDFD})
"""The handles of offers whose bytes lie in GPU memory."""

BATCH = 32
"""Descriptors of one frame, which could carry 253."""


def handle_for(way: FdWay) -> Handle:
    """What an offer says. Raises TransportError where this process cannot give descriptors that way."""
    if way == "pidfd":
        own = pidfd.myself()
        return Handle(kind=PIDFD, pid=own.pid, pid_ns=own.pid_ns, start_ticks=own.start_ticks)
    return Handle(kind=SCM)


class Given:
    """The sender's half, for one version. ``close`` it when every worker has answered, and again when the thread that
    gives has ended, if that may be later: what it has added meanwhile is closed then, and nothing twice. A number that
    was closed twice would be the descriptor of somebody who opened his in between."""

    def __init__(self, ways: Mapping[Link, FdWay], *, session: str, wait_s: float) -> None:
        self._ways = ways
        self._session = session
        self._wait_s = wait_s
        self._keeps = False
        self._lock = threading.Lock()
        self._kept: list[int] = []

    def check(self, segments: Mapping[OwnSegment, Sequence[Link]]) -> None:
        """Raise TransportError unless the descriptors that each segment's links need can be given and be open."""
        once = every = fetched = 0
        for segment, links in segments.items():
            if segment.told.ipc or not links:
                continue
            if any(self._ways[link] == "scm" and not link.passes_fds for link in links):
                raise TransportError(
                    "a descriptor cannot travel over TCP", next_step="share a folder, or a PID namespace"
                )
            every += len(segment.chunks)
            once = max(once, min(len(segment.chunks), BATCH))
            fetched += len(segment.chunks) if any(self._ways[link] == "pidfd" for link in links) else 0
        self._keeps = every <= check_descriptors(max(once, fetched), side="trainer")

    def give(self, segment: OwnSegment, links: Sequence[Link]) -> None:
        """Hand one segment's memory to each of ``links``. Raises GpuError, LinkLost or DeadlineExceeded."""
        if segment.told.ipc:
            return
        for first in range(0, len(segment.chunks), BATCH):
            fds: list[int] = []
            try:
                fds.extend(chunk.driver.export_fd(chunk.name) for chunk in segment.chunks[first : first + BATCH])
                for link in links:
                    self._send(link, segment.told.id, first, fds)
            finally:
                if self._keeps or any(self._ways[link] == "pidfd" for link in links):
                    with self._lock:
                        self._kept += fds
                else:
                    close_fds(fds)

    def _send(self, link: Link, segment: int, first: int, fds: Sequence[int]) -> None:
        fetched = self._ways[link] == "pidfd"
        chunks = Chunks(
            session=self._session, segment=segment, first=first, count=len(fds), fds=tuple(fds) if fetched else ()
        )
        link.send(chunks, fds=() if fetched else fds, deadline=time.monotonic() + self._wait_s)

    def close(self) -> None:
        """Close what was kept, in a thread of its own. May be called by several threads, and again."""
        with self._lock:
            kept, self._kept = self._kept, []
        if kept:
            threading.Thread(target=close_fds, args=(kept,), name="syncstack-close", daemon=True).start()


def taken(handle: Handle, chunks: Chunks, fds: Sequence[int]) -> Iterator[int]:
    """The receiver's half: the descriptors of one frame, in order, each only until the next is asked for. ``fds`` came
    with the frame and stay the caller's. Raises HandleRefused or ProtocolError."""
    fetched = handle.kind == PIDFD
    come = len(chunks.fds) if fetched else len(fds)
    if come != chunks.count or (fds if fetched else chunks.fds):
        raise ProtocolError(
            "GPU memory without its descriptors",
            observed=f"{len(fds)} with the frame, {len(chunks.fds)} named",
            expected=f"{chunks.count} {'named' if fetched else 'with the frame'}",
        )
    if not fetched:
        yield from fds
        return
    process = pidfd.Process(pid=handle.pid, pid_ns=handle.pid_ns, start_ticks=handle.start_ticks)
    for number in chunks.fds:
        fd = pidfd.take(process, number)
        try:
            yield fd
        finally:
            os.close(fd)
