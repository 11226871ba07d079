"""An engine worker's data socket: accepts trainer ranks, keeps the versions that are being staged.

One daemon thread accepts and one serves each link, so that bytes are verified while the engine still generates; the
engine's own thread only takes finished versions out, in ``take``. A bad link is closed and never harms another.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path

from syncstack.errors import LinkLost, ProtocolError, SyncstackError
from syncstack.transports.host_fd.receiver import HostFdReceiver, StagedVersion
from syncstack.wire import unix
from syncstack.wire.link import Link, close_fds, greet
from syncstack.wire.messages import BucketReady, Fault, Offer, StageEnd

log = logging.getLogger(__name__)

MAX_LINKS = 64
"""Trainer ranks that may be connected to one worker at once."""

IDLE_S = 3600.0
"""A link may be silent this long between refits before its thread looks up."""


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
        """The version that was staged under ``session``. Raises ProtocolError or LinkLost; does not block."""
        with self._lock:
            version = self._versions.get(session)
        if version is None:
            raise ProtocolError(
                f"worker {self.rank} has no staged version of session {session}",
                next_step="stage the weights over the data link before load",
            )
        if version.lost:
            raise LinkLost(f"the trainer's link to worker {self.rank} ended after it staged its weights")
        return version

    def drop(self, session: str) -> None:
        """Forget a session, whatever became of it. Views that a loader still holds stay readable."""
        with self._lock:
            version = self._versions.pop(session, None)
        if version is not None:
            version.close()

    def num_links(self) -> int:
        """How many trainer ranks are connected."""
        with self._lock:
            return len(self._links)

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
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    log.exception("worker %d can no longer accept data links", self.rank)
                return
            threading.Thread(target=self._serve, args=(sock,), name="syncstack-link", daemon=True).start()

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
        except SyncstackError as error:
            log.warning("a link to worker %d was closed: %s", self.rank, error)
            self._fault(link, "", error)
        finally:
            for version in mine:
                version.lost = True
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
        message, fds = link.receive(deadline=time.monotonic() + IDLE_S)
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
        failure: SyncstackError | None = None
        version: StagedVersion | None = None
        try:
            version = receiver.open(offer, fds)
            mine[:] = [version]
            with self._lock:
                self._versions[offer.session] = version
        except SyncstackError as error:
            failure = error
        while True:
            message, extra = link.receive(deadline=time.monotonic() + self._link_s)
            close_fds(extra)
            if not isinstance(message, BucketReady | StageEnd) or message.session != offer.session:
                raise ProtocolError("unexpected message inside a stage", observed=type(message).__name__)
            if isinstance(message, StageEnd):
                break
            if version is not None and failure is None:
                try:
                    version.read_bucket(message)
                except SyncstackError as error:
                    failure = error
        self._answer(link, offer.session, version, failure)

    def _answer(self, link: Link, session: str, version: StagedVersion | None, failure: SyncstackError | None) -> None:
        try:
            if version is not None and failure is None:
                staged = version.finish_staging()
                link.send(staged, deadline=time.monotonic() + self._link_s)
                return
        except LinkLost:
            raise
        except SyncstackError as error:
            failure = error
        assert failure is not None
        self.drop(session)
        self._fault(link, session, failure)

    def _fault(self, link: Link, session: str, error: SyncstackError) -> None:
        try:
            fault = Fault(session=session, kind=type(error).__name__, text=str(error)[:8000])
            link.send(fault, deadline=time.monotonic() + 1.0)
        except SyncstackError:
            pass  # the peer is gone, or does not read: there is nobody left to tell
