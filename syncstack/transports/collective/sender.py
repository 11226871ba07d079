"""The trainer's half of ``collective``: as ``stream`` reads, digests and announces, but the bytes go into the group.

Once, to its first worker. A group lasts for as long as its links do; whatever goes wrong ends it, because nobody knows
then how far each member has come, and the next version makes another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from syncstack.errors import ProtocolError, TransportError
from syncstack.transports.answers import raise_fault
from syncstack.transports.collective.group import MAX_OPEN, Group
from syncstack.transports.collective.receiver import JOIN_S, KIND
from syncstack.transports.stream.sender import StreamSender, pieces_of
from syncstack.transports.values import check_going
from syncstack.wire.link import Link, close_fds
from syncstack.wire.messages import MAX_PIECE_BYTES, BucketReady, Card, Cards, Cast, Join


class CollectiveSender(StreamSender):
    """See StreamSender. All links are over TCP."""

    kind = KIND

    def __init__(self, *, bucket_bytes: int) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        self._group: Group | None = None
        self._members: list[Link] = []
        self._rooms = [memoryview(bytearray(MAX_PIECE_BYTES)) for _ in range(MAX_OPEN + 1)]
        """Where pieces of several tensors are put together: one more than may be under way."""
        self._room = 0

    def _prepare(self, links: Sequence[Link], session: str, wait_s: float) -> None:
        """Make the group of these links, unless it is there. Raises GroupLost, or what a worker says instead."""
        if self._group is not None and self._members == [*links]:
            self._group.wait_s = wait_s
            return
        self._broken()
        host = host_of(links)
        for place, link in enumerate(links, 1):
            join = Join(session=session, place=place, size=len(links) + 1)
            link.send(join, deadline=time.monotonic() + wait_s)
        join_s = min(JOIN_S, wait_s)

        def exchange(own: bytes) -> Sequence[bytes]:
            cards = Cards(session=session, cards=(own, *(_card(link, session, join_s) for link in links)))
            for link in links:
                link.send(cards, deadline=time.monotonic() + join_s)
            return cards.cards

        self._group = Group(0, len(links) + 1, host=host, exchange=exchange, join_s=join_s, wait_s=wait_s)
        self._members = [*links]

    def _send_bucket(
        self,
        parts: Sequence[memoryview],
        ready: BucketReady,
        links: Sequence[Link],
        stop: threading.Event,
        wait_s: float,
    ) -> None:
        group = self._group
        assert group is not None
        for piece in pieces_of(parts):
            check_going(stop)
            data = self._whole(piece)
            for link in links:
                link.send(Cast(session=ready.session, nbytes=len(data)), deadline=time.monotonic() + wait_s)
            group.send(data)
        group.settle()
        for link in links:
            link.send(ready, deadline=time.monotonic() + wait_s)

    def _whole(self, piece: Sequence[memoryview]) -> torch.Tensor:
        """A piece in one run of bytes: where it lies, or copied together."""
        if len(piece) == 1:
            return torch.frombuffer(piece[0], dtype=torch.uint8)
        room = self._rooms[self._room]
        self._room = (self._room + 1) % len(self._rooms)
        at = 0
        for part in piece:
            room[at : at + part.nbytes] = part
            at += part.nbytes
        return torch.frombuffer(room[:at], dtype=torch.uint8)

    def _broken(self) -> None:
        """See StreamSender: leave the group, which ends every member's wait."""
        group, self._group = self._group, None
        self._members = []
        if group is not None:
            group.close()

    def close(self) -> None:
        """See StreamSender."""
        self._broken()
        super().close()


def host_of(links: Sequence[Link]) -> str:
    """The address at which this process is seen from the other end of its links."""
    hosts = {link.local_host for link in links}
    if len(hosts) != 1 or "" in hosts:
        raise TransportError(
            "a group needs links over TCP that all leave by one address",
            observed=", ".join(sorted(host or "a unix socket" for host in hosts)),
        )
    return hosts.pop()


def _card(link: Link, session: str, wait_s: float) -> bytes:
    message, fds = link.receive(deadline=time.monotonic() + wait_s)
    close_fds(fds)
    raise_fault(message)
    if not isinstance(message, Card) or message.session != session:
        raise ProtocolError("unexpected answer on a data link", observed=type(message).__name__, expected="Card")
    return message.card
