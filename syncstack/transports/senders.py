"""The sender of each transport of this build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from syncstack.errors import TransportError
from syncstack.transports.host_fd.handover import FdWay
from syncstack.transports.host_fd.sender import HostFdSender
from syncstack.weights.manifest import Manifest, Wanted
from syncstack.weights.source import WeightSource
from syncstack.wire.link import Link
from syncstack.wire.messages import Staged


class Sender(Protocol):
    """The trainer's half of a transport."""

    cast_bytes: int

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
    ) -> tuple[Manifest, list[Staged]]:
        """Move one version to every link's worker and wait until each has read and verified it."""
        ...

    def retire(self) -> None:
        """Give up what a worker may still be reading."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def make_sender(transport: str, *, bucket_bytes: int) -> Sender:
    """A sender of ``transport``."""
    if transport == "host_fd":
        return HostFdSender(bucket_bytes=bucket_bytes)
    raise TransportError(f"this build has no sender for {transport}")
