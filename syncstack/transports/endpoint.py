"""An engine worker's data socket: accepts trainer ranks, keeps the versions that are being staged.

One daemon thread accepts and one serves each link, so that bytes are verified while the engine still generates; the
engine's own thread only takes finished versions out, in ``take``. A bad link is closed and never harms another.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from pathlib import Path

from syncstack.errors import DeadlineExceeded, LinkLost, ProtocolError, SyncstackError
from syncstack.transports.host_fd.receiver import HostFdReceiver, StagedVersion
from syncstack.wire import unix
from syncstack.wire.link import Link, close_fds, greet
from syncstack.wire.messages import BucketReady, Fault, Offer, StageEnd

log = logging.getLogger(__name__)

MAX_LINKS = 64
"""Trainer ranks that may be connected to one worker at once."""

IDLE_S = 3600.0
"""How long a link's thread waits for the next refit at a time; it then waits again."""


class WorkerEndpoint:
    """Listens on ``path`` from construction until ``close``."""

    def __init__(self, path: Path, *, rank: int, link_s: float) -> None:
        self.path = path
        self.rank = rank
        self._link_s = link_s
        self._versions: dict[str, StagedVersion] = {}
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = unix.listen(path)
        threading.Thread(target=self._accept, name="syncstack-accept", daemon=True).start()

    def take(self, session: str) -> StagedVersion:
        """The version that was staged under ``session``. Raises ProtocolError; does not block."""
        with self._lock:
            version = self._versions.get(session)
        if version is None or version.lost:
            raise ProtocolError(
                f"worker {self.rank} has no staged version of this session, or its trainer's link has ended",
                next_step="stage the weights over the data link before load",
            )
        return version

    def drop(self, session: str) -> None:
        """Forget a session, whatever became of it. Views that a loader still holds stay readable."""
        with self._lock:
            version = self._versions.pop(session, None)
        if version is not None:
            version.close()

    def close(self) -> None:
        """Stop listening and end every link."""
        self._closed = True
        self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def _accept(self) -> None:
        while not self._closed:
            sock: socket.socket | None = None
            try:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(sock,), name="syncstack-link", daemon=True).start()
            except (OSError, RuntimeError) as error:
                # Out of descriptors or threads: it may pass, and a worker that cannot be reached is of no use.
                if sock is not None:
                    sock.close()
                if not self._closed:
                    log.warning("worker %d could not accept a data link: %s", self.rank, error)
                    time.sleep(0.1)

    def _serve(self, sock: socket.socket) -> None:
        link = Link(sock)
        receiver = HostFdReceiver()
        mine: list[StagedVersion] = []
        try:
            unix.check_peer(sock)
            self._admit(link)
            greet(link, role="worker", rank=self.rank, deadline=time.monotonic() + self._link_s)
            while True:
                self._serve_one(link, receiver, mine)
        except LinkLost:
            log.info("a trainer's link to worker %d ended", self.rank)
        except Exception as error:
            known = error if isinstance(error, SyncstackError) else ProtocolError(f"{type(error).__name__}: {error}")
            log.warning("a link to worker %d was closed: %s", self.rank, known, exc_info=known is not error)
            self._fault(link, "", type(known).__name__, str(known))
        finally:
            for version in mine:
                version.lost = True
                self.drop(version.offer.session)
            with self._lock:
                self._links.discard(link)
            link.close()
            receiver.close()

    def _admit(self, link: Link) -> None:
        with self._lock:
            if len(self._links) >= MAX_LINKS:
                raise ProtocolError("too many data links", observed=str(len(self._links)), expected=f"< {MAX_LINKS}")
            self._links.add(link)

    def _serve_one(self, link: Link, receiver: HostFdReceiver, mine: list[StagedVersion]) -> None:
        try:
            message, fds = link.receive(deadline=time.monotonic() + IDLE_S)
        except DeadlineExceeded:
            return
        try:
            if not isinstance(message, Offer):
                raise ProtocolError("unexpected message", observed=type(message).__name__, expected="Offer")
            self._stage(link, receiver, message, fds, mine)
        finally:
            close_fds(fds)

    def _stage(
        self, link: Link, receiver: HostFdReceiver, offer: Offer, fds: list[int], mine: list[StagedVersion]
    ) -> None:
        """Serve one offer to its end. A fault of the bytes is told to the sender and ends the session, not the link."""
        for old in mine:
            self.drop(old.offer.session)
        mine.clear()
        # Kind and text, not the exception: its traceback would hold the mapping.
        failure: tuple[str, str] | None = None
        try:
            mine.append(receiver.open(offer, fds))
            self._register(mine[0])
        except SyncstackError as error:
            failure = type(error).__name__, str(error)
        while True:
            message, extra = link.receive(deadline=time.monotonic() + self._link_s)
            close_fds(extra)
            if not isinstance(message, BucketReady | StageEnd) or message.session != offer.session:
                raise ProtocolError("unexpected message inside a stage", observed=type(message).__name__)
            if failure is not None and isinstance(message, BucketReady):
                continue
            try:
                if failure is None and isinstance(message, BucketReady):
                    mine[0].read_bucket(message)
                    continue
                answer = mine[0].finish_staging() if failure is None else None
            except SyncstackError as error:
                failure = type(error).__name__, str(error)
                answer = None
            if isinstance(message, StageEnd):
                break
        if answer is not None:
            link.send(answer, deadline=time.monotonic() + self._link_s)
            return
        assert failure is not None
        self.drop(offer.session)
        self._fault(link, offer.session, *failure)

    def _register(self, version: StagedVersion) -> None:
        with self._lock:
            if version.offer.session in self._versions:
                raise ProtocolError("this session was offered weights already")
            self._versions[version.offer.session] = version

    def _fault(self, link: Link, session: str, kind: str, text: str) -> None:
        # The peer may be gone, or not read: then there is nobody left to tell.
        with contextlib.suppress(SyncstackError):
            link.send(Fault(session=session, kind=kind, text=text[:8000]), deadline=time.monotonic() + 1.0)
