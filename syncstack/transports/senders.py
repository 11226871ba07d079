"""The trainer's half of every transport of this build, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from syncstack.errors import PlanError
from syncstack.transports import SPOKEN
from syncstack.transports.collective.sender import CollectiveSender
from syncstack.transports.cuda.sender import BY_FD, BY_IPC, CudaSender
from syncstack.transports.host_fd.handover import FdWay
from syncstack.transports.host_fd.sender import HostFdSender
from syncstack.transports.stream.sender import StreamSender
from syncstack.weights.manifest import WHOLE, Manifest, Share, Wanted
from syncstack.weights.source import WeightSource
from syncstack.wire.link import Link
from syncstack.wire.messages import Staged

_BY_GPU = {"cuda_fd": BY_FD, "cuda_ipc": BY_IPC}


class Sender(Protocol):
    """Moves versions to workers. One per trainer rank, called from one thread."""

    @property
    def cast_bytes(self) -> int:
        """Bytes of the last version's values that had another dtype than the one in which they travel."""
        ...

    @property
    def unpinned(self) -> str:
        """Why values of a GPU went through memory that is not page-locked, and so slower; "" where they did not."""
        ...

    def stage(
        self,
        source: WeightSource,
        wanted: Sequence[Wanted],
        links: Sequence[Link],
        *,
        session: str,
        version: int,
        wait_s: float,
        fd_ways: Mapping[Link, FdWay] | None = None,
        share: Share = WHOLE,
    ) -> tuple[Manifest, list[Staged]]:
        """Move one version to every link's worker; blocks until each has verified it.

        With several trainer ranks ``wanted`` is this one's ``share`` of it. ``wait_s`` bounds each message, not the
        whole. Raises DigestMismatch, TransportError, LinkError or DeadlineExceeded as soon as it is known.
        """
        ...

    def retire(self) -> None:
        """A worker may still read what was staged last: never write that memory again."""
        ...

    def close(self) -> None:
        """Free everything. Links are the caller's."""
        ...


def make_sender(transport: str, *, bucket_bytes: int, device: str = "") -> Sender:
    """The sender of ``transport``; ``bucket_bytes`` is how often a worker is told what it may read, ``device`` the UUID
    of the GPU that holds the weights, "" for none.

    Raises PlanError for a transport that is not in this build, TransportError for one that cannot work in this process.
    """
    if transport in _BY_GPU:
        return CudaSender(_BY_GPU[transport], device)
    if transport == "host_fd":
        return HostFdSender(bucket_bytes=bucket_bytes)
    if transport == "collective":
        return CollectiveSender(bucket_bytes=bucket_bytes)
    if transport == "stream":
        return StreamSender(bucket_bytes=bucket_bytes)
    raise PlanError(f"transport {transport!r} is not in this build", expected=", ".join(SPOKEN))
