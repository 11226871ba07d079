"""The consumer's half of the drop-in: map a producer's GPU memory by descriptors that its lender hands out."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from syncstack.compat.ticket import Back, Copied, Copy, Lent, Refused, Said, Ticket, Want, hear, say
from syncstack.errors import GpuError, HandleRefused, ProtocolError, SyncstackError, TransportError
from syncstack.transports import pidfd
from syncstack.transports.cuda.driver import Driver
from syncstack.transports.cuda.mapping import map_chunks
from syncstack.wire import unix
from syncstack.wire.link import close_fds
from syncstack.wire.messages import MAX_CHUNKS, Segment

log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long a lender may take over one answer. It may have to copy."""


class Borrower:
    """One per process. Safe to call from several threads."""

    def __init__(self, driver: Callable[[], Driver]) -> None:
        self._load = driver
        self._driver: Driver | None = None
        self._sockets: dict[str, socket.socket] = {}
        self._lock = threading.RLock()
        self._native: dict[tuple[pidfd.Process, bool], bool] = {}
        self._warned = False
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._give_back, name="syncstack-borrower", daemon=True).start()

    @property
    def driver(self) -> Driver:
        """The driver. Raises TransportError where there is none."""
        if self._driver is None:
            self._driver = self._load()
        return self._driver

    def works_natively(self, ticket: Ticket) -> bool:
        """Whether torch's own way opens this producer's memory from here: for a legacy handle in one PID namespace, for
        descriptors where one can be taken out of the producer. Tried once for each producer."""
        key = (ticket.process, ticket.pidfd)
        if key not in self._native:
            self._native[key] = _tried(ticket)
        return self._native[key]

    def open(self, ticket: Ticket) -> torch.Tensor:
        """uint8 [nbytes] of the producer's memory, or of a copy of it where it cannot be mapped, which is said once.

        The memory is the producer's own: who writes it writes there, as with torch's own sharing. Blocks for one or two
        answers of the lender. Raises HandleRefused, TransportError or LinkLost.
        """
        try:
            return self._mapped(ticket)
        except TransportError as error:
            if not self._warned:
                self._warned = True
                log.warning("GPU memory of another process is copied through the host: %s", error)
        return self._copied(ticket)

    def counted(self, ticket: Ticket) -> None:
        """Torch has opened it: the lender need not know of it any more."""
        with contextlib.suppress(SyncstackError):
            self._tell(ticket, Back(entry=ticket.entry, counted=True))

    def _mapped(self, ticket: Ticket) -> torch.Tensor:
        driver = self.driver
        driver.bind(ticket.device)
        sizes: list[int] = []
        held: list[int] = []
        problems: list[GpuError] = []
        offset = 0

        def take(answer: Said, fds: list[int]) -> bool:
            nonlocal offset
            if not isinstance(answer, Lent) or len(fds) != len(answer.sizes) or len(sizes) > MAX_CHUNKS:
                raise _refused(answer)
            offset = answer.offset
            sizes.extend(answer.sizes)
            try:
                held.extend(driver.import_fd(fd) for fd in fds)
            except GpuError as error:
                problems.append(error)  # later: what else comes of this answer has to be read
            return answer.more

        try:
            self._ask(ticket, Want(entry=ticket.entry), take)
            if problems:
                raise problems[0]
            if not sizes or offset + ticket.nbytes > sum(sizes):
                raise ProtocolError("less GPU memory was lent than was announced", observed=str(sum(sizes)))
            segment = Segment(id=0, device=ticket.device, chunks=tuple(sizes))
            base, ended = map_chunks(driver, segment, held, write=True)
        finally:
            for handle in held:
                driver.release(handle)  # what is mapped holds it from here on

        def end() -> None:
            ended()
            with contextlib.suppress(SyncstackError):
                self._tell(ticket, Back(entry=ticket.entry))

        def released() -> None:
            self._done.put(end)  # not here: whatever drops the last tensor may hold our lock

        return driver.view(base + offset, ticket.nbytes, ticket.device, released)

    def _copied(self, ticket: Ticket) -> torch.Tensor:
        driver = self.driver
        found: list[torch.Tensor] = []

        def take(answer: Said, fds: list[int]) -> bool:
            if not isinstance(answer, Copied) or len(fds) != 1 or os.fstat(fds[0]).st_size < ticket.nbytes:
                raise _refused(answer)
            with mmap.mmap(fds[0], ticket.nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
                into = driver.empty(ticket.nbytes, ticket.device)
                source = torch.frombuffer(memory, dtype=torch.uint8)
                into.copy_(source)
                del source
            found.append(into)
            return False

        self._ask(ticket, Copy(entry=ticket.entry), take)
        self._tell(ticket, Back(entry=ticket.entry))
        return found[0]

    def _ask(self, ticket: Ticket, request: Said, take: Callable[[Said, list[int]], bool]) -> None:
        """Send a request and give each answer to ``take`` until it says that no more come."""
        with self._lock:
            sock = self._connected(ticket.socket)
            try:
                say(sock, request)
                more = True
                while more:
                    answer, fds = hear(sock)
                    try:
                        more = take(answer, fds)
                    finally:
                        close_fds(fds)
            except BaseException as error:
                if not isinstance(error, HandleRefused):  # what follows on this socket may answer something else
                    self._sockets.pop(ticket.socket).close()
                raise

    def _tell(self, ticket: Ticket, message: Said) -> None:
        with self._lock:
            say(self._connected(ticket.socket), message)

    def _connected(self, path: str) -> socket.socket:
        if path not in self._sockets:
            deadline = time.monotonic() + ANSWER_S
            sock = unix.connect(Path(path), deadline=deadline, kind=socket.SOCK_SEQPACKET)
            sock.settimeout(ANSWER_S)
            self._sockets[path] = sock
        return self._sockets[path]

    def _give_back(self) -> None:
        while True:
            end = self._done.get()
            try:
                end()
            except Exception:
                log.exception("a mapping of another process's GPU memory was not given back")
            del end


def _tried(ticket: Ticket) -> bool:
    try:
        if not ticket.pidfd:
            return ticket.process.pid_ns == pidfd.numbers().pid_ns
        os.close(pidfd.take(ticket.process, ticket.fd))
    except SyncstackError as error:
        log.info("torch's own sharing of GPU memory does not work here: %s", error)
        return False
    return True


def _refused(answer: Said) -> SyncstackError:
    if isinstance(answer, Refused):
        return HandleRefused(f"the producer of shared GPU memory refused it: {answer.text}")
    return ProtocolError("an answer that does not belong here", observed=type(answer).__name__)
