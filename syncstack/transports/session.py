"""The worker's side of one data link: offers and buckets as they come, from greeting to end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from syncstack.errors import DeadlineExceeded, ProtocolError, SyncstackError
from syncstack.transports.collective.receiver import JOIN_S, CollectiveReceiver
from syncstack.transports.collective.receiver import KIND as GROUP
from syncstack.transports.cuda.handover import KINDS as CUDA
from syncstack.transports.cuda.receiver import CudaReceiver
from syncstack.transports.host_fd.receiver import HostFdReceiver
from syncstack.transports.staged import StagedVersion
from syncstack.transports.stream.receiver import KIND as STREAM
from syncstack.transports.stream.receiver import StreamReceiver
from syncstack.wire.link import Link, close_fds
from syncstack.wire.messages import (
    BucketReady,
    Card,
    Cards,
    Cast,
    Chunks,
    Fault,
    Join,
    Message,
    Offer,
    Piece,
    Staged,
    StageEnd,
    Table,
)

log = logging.getLogger(__name__)

IDLE_S = 3600.0
"""How long a link's thread waits for the next refit at a time; it then waits again."""

FAULT_S = 1.0
"""How long a Fault may take to be sent. The peer may be gone, or not read."""


_Staging = Table | Chunks | Piece | Join | Cards | Cast | BucketReady | StageEnd
"""What a sender says between its offer and the worker's answer."""


class Registry(Protocol):
    """Where staged versions are kept for the engine's thread."""

    def register(self, version: StagedVersion) -> None:
        """Keep a version; raises ProtocolError when its session has one already."""
        ...

    def drop(self, session: str, share: int | None = None) -> None:
        """Forget a session, or one share of it."""
        ...


class LinkServer:
    """One link's conversation. Used from that link's thread only."""

    def __init__(
        self,
        link: Link,
        registry: Registry,
        *,
        link_s: float,
        device: Callable[[], torch.device | None] = lambda: None,
    ) -> None:
        self._link = link
        self._registry = registry
        self._link_s = link_s
        self._by_fd = HostFdReceiver(device)
        self._by_link = StreamReceiver()
        self._by_gpu = CudaReceiver()
        self._by_group = CollectiveReceiver(link.local_host, link_s)
        self._version: StagedVersion | None = None
        self._refused = ""
        """The session that this side gave up; its sender may have sent more of it before it heard so."""

    def run(self) -> None:
        """Serve offers until the link ends: raises LinkLost then, ProtocolError for what does not belong here."""
        while True:
            try:
                message, fds = self._link.receive(deadline=time.monotonic() + IDLE_S)
            except DeadlineExceeded:
                continue
            try:
                if isinstance(message, Offer):
                    self._stage(message, fds)
                elif isinstance(message, _Staging) and message.session == self._refused:
                    self._skip(message)
                else:
                    raise ProtocolError("unexpected message", observed=type(message).__name__, expected="Offer")
            finally:
                close_fds(fds)

    def _stage(self, offer: Offer, fds: list[int]) -> None:
        """Serve one offer to its end. What goes wrong with its bytes is told to the sender at once, while it may still
        be writing the rest, and ends the session but not the link."""
        self._forget()
        try:
            version = self._open(offer, fds)
            self._registry.register(version)
        except Exception as error:  # noqa: BLE001 - whatever it is, the sender waits to hear it
            self._refuse(offer.session, error)
            return
        self._version = version
        staged: Staged | None = None
        while staged is None:
            message, fds = self._next(offer.session)
            place: memoryview | None = None
            try:
                if isinstance(message, StageEnd):
                    staged = version.finish_staging()
                elif isinstance(message, Piece):
                    place = version.place(message.nbytes)
                else:
                    self._tell(version, message, fds)
            except Exception as error:  # noqa: BLE001 - as above
                self._refuse(offer.session, error)
                self._skip(message)
                return
            finally:
                close_fds(fds)
            if place is not None:
                # Outside: a link that ends inside a piece cannot serve another session.
                self._link.receive_bytes(place, deadline=time.monotonic() + self._link_s)
        self._link.send(staged, deadline=time.monotonic() + self._link_s)

    def _tell(self, version: StagedVersion, message: _Staging, fds: list[int]) -> None:
        """What a sender says on the way, and after which it goes on."""
        if isinstance(message, BucketReady):
            version.read_bucket(message)
        elif isinstance(message, Cast):
            version.take_cast(message.nbytes)
        elif isinstance(message, Join):
            version.join(message, partial(self._exchange, version.offer.session))
        elif isinstance(message, Table | Chunks):
            version.hand_over(message, fds)
        else:
            raise _unexpected(message)

    def _open(self, offer: Offer, fds: list[int]) -> StagedVersion:
        """Accept an offer by the transport that it names; what the others hold is of no use any more."""
        kind = offer.handle.kind
        if kind != STREAM:
            self._by_link.close()
        if kind != GROUP:
            self._by_group.close()
        if kind not in CUDA:
            self._by_gpu.close()
        opens = {STREAM: self._by_link.open, GROUP: self._by_group.open, **dict.fromkeys(CUDA, self._by_gpu.open)}
        if kind in opens:
            self._by_fd.close()
            return opens[kind](offer)
        return self._by_fd.open(offer, fds)

    def _exchange(self, session: str, card: bytes) -> tuple[bytes, ...]:
        """Give the sender this worker's card and get those of its whole group."""
        deadline = time.monotonic() + min(JOIN_S, self._link_s)
        self._link.send(Card(session=session, card=card), deadline=deadline)
        message, fds = self._next(session, deadline)
        close_fds(fds)
        if not isinstance(message, Cards):
            raise ProtocolError("unexpected message", observed=type(message).__name__, expected="Cards")
        return message.cards

    def _skip(self, message: _Staging) -> None:
        """What the sender had still to say of a session that was refused, and the bytes that it had announced."""
        if isinstance(message, Piece):
            self._link.skip_bytes(message.nbytes, deadline=time.monotonic() + self._link_s)

    def _next(self, session: str, deadline: float | None = None) -> tuple[_Staging, list[int]]:
        """The next message of a stage and its descriptors, which are the caller's to close."""
        message, fds = self._link.receive(deadline=deadline or time.monotonic() + self._link_s)
        if not isinstance(message, _Staging) or message.session != session:
            close_fds(fds)
            raise _unexpected(message)
        return message, fds

    def _refuse(self, session: str, error: Exception) -> None:
        self._forget()
        self._refused = session
        log.warning("session %s was refused: %s", session, error)
        send_fault(self._link, session, error)
        self._by_group.leave()  # afterwards: the others only see that it left, and the sender shall hear why first

    def _forget(self) -> None:
        if self._version is not None:
            self._registry.drop(self._version.offer.session, self._version.offer.share.index)
            self._version = None

    def close(self) -> None:
        """The link has ended: nobody vouches any more for what came over it."""
        if self._version is not None:
            self._version.lost = True
            self._forget()
        for receiver in (self._by_fd, self._by_link, self._by_gpu, self._by_group):
            receiver.close()


def _unexpected(message: Message) -> ProtocolError:
    return ProtocolError("unexpected message inside a stage", observed=type(message).__name__)


def send_fault(link: Link, session: str, error: Exception) -> None:
    """Tell the peer what went wrong, if it is still there to be told."""
    kind = type(error).__name__ if isinstance(error, SyncstackError) else "TransportError"
    text = str(error) if isinstance(error, SyncstackError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(SyncstackError):
        fault = Fault(session=session, kind=kind, text=text[:8000])
        link.send(fault, deadline=time.monotonic() + FAULT_S)
