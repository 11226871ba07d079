"""An engine worker's data sockets: accept trainer ranks, keep the versions that are being staged.

One daemon thread accepts on each socket and one serves each link, so that bytes are verified while the engine still
generates; the engine's own thread only takes finished versions out, in ``take``. A bad link is closed and never harms
another.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from syncstack.errors import LinkLost, ProtocolError, SyncstackError
from syncstack.transports.session import LinkServer, send_fault
from syncstack.transports.staged import JointVersion, StagedVersion
from syncstack.wire import unix
from syncstack.wire.auth import AUTH_S, Token, prove_as_worker
from syncstack.wire.link import Link, greet

log = logging.getLogger(__name__)

MAX_LINKS = 64
"""Trainer ranks that may be connected to one worker at once."""

MAX_STRANGERS = 32
"""TCP connections that may be proving who they are at once. They take no place from those who have."""


class WorkerEndpoint:
    """Listens from construction until ``close``: on a unix socket at ``path``, on ``tcp``, or on both.

    ``tcp`` is a listening socket; it is the endpoint's from here on, and needs ``token``. ``device`` is asked, in a
    link's thread, where the engine's weights lie.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        rank: int,
        link_s: float,
        tcp: socket.socket | None = None,
        token: Token | None = None,
        device: Callable[[], torch.device | None] = lambda: None,
    ) -> None:
        assert tcp is None or token is not None
        self.path = path
        self.port: int = 0 if tcp is None else tcp.getsockname()[1]
        self.rank = rank
        self._link_s = link_s
        self._device = device
        self._token = token
        self._versions: dict[str, dict[int, StagedVersion]] = {}
        """The shares of each session, by index."""
        self._strangers: set[Link] = set()
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listeners = [] if tcp is None else [tcp]
        if path is not None:
            self._listeners.append(unix.listen(path))
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="syncstack-accept", daemon=True).start()

    def take(self, session: str) -> StagedVersion | JointVersion:
        """The version that was staged under ``session``. Raises ProtocolError; does not block."""
        with self._lock:
            parts = list(self._versions.get(session, {}).values())
        if not parts or any(part.lost for part in parts):
            raise ProtocolError(
                f"worker {self.rank} has no staged version of this session, or its trainer's link has ended",
                next_step="stage the weights over the data link before load",
            )
        count = parts[0].offer.share.count
        if len(parts) < count:
            raise ProtocolError(
                f"worker {self.rank} lacks shares of this session",
                observed=f"{len(parts)} shares",
                expected=f"{count}, one of each trainer rank",
            )
        return parts[0] if count == 1 else JointVersion(parts)

    def register(self, version: StagedVersion) -> None:
        """Let ``take`` find what is being staged. Raises ProtocolError when its session has it already, or is divided
        in another way."""
        session, share = version.offer.session, version.offer.share
        with self._lock:
            parts = self._versions.get(session, {})
            if share.index in parts or any(part.offer.share.count != share.count for part in parts.values()):
                raise ProtocolError("this session was offered weights already")
            self._versions[session] = {**parts, share.index: version}

    def drop(self, session: str, share: int | None = None) -> None:
        """Forget a session or one share of it, whatever became of it. Views that a loader still holds stay readable."""
        with self._lock:
            parts = self._versions.pop(session, {})
            dropped = [parts.pop(index) for index in [*parts] if share in (None, index)]
            if parts:
                self._versions[session] = parts
        for part in dropped:
            part.close()

    def close(self) -> None:
        """Stop listening and end every link."""
        self._closed = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        with self._lock:
            links = [*self._links, *self._strangers]
        for link in links:
            link.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            sock: socket.socket | None = None
            try:
                sock, _ = listener.accept()
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
        server = LinkServer(link, self, link_s=self._link_s, device=self._device)
        try:
            self._identify(link, sock)
            self._admit(self._links, link, MAX_LINKS)
            greet(link, role="worker", rank=self.rank, deadline=time.monotonic() + self._link_s)
            server.run()
        except LinkLost:
            log.info("a trainer's link to worker %d ended", self.rank)
        except Exception as error:
            known = error if isinstance(error, SyncstackError) else ProtocolError(f"{type(error).__name__}: {error}")
            log.warning("a link to worker %d was closed: %s", self.rank, known, exc_info=known is not error)
            send_fault(link, "", known)
        finally:
            server.close()
            with self._lock:
                self._links.discard(link)
                self._strangers.discard(link)
            link.close()

    def _identify(self, link: Link, sock: socket.socket) -> None:
        """Raise unless the peer is one of ours: the kernel says so, or it proves the token."""
        if link.passes_fds:
            unix.check_peer(sock)
        else:
            assert self._token is not None
            self._admit(self._strangers, link, MAX_STRANGERS)
            prove_as_worker(link, self._token, rank=self.rank, deadline=time.monotonic() + AUTH_S)

    def _admit(self, links: set[Link], link: Link, most: int) -> None:
        with self._lock:
            if len(links) >= most:
                raise ProtocolError("too many data links", observed=str(len(links)), expected=f"< {most}")
            self._strangers.discard(link)
            links.add(link)
