"""The producer's half of the drop-in: a small server that hands out descriptors of its GPU memory, on demand.

Nothing is exported, held or copied for a tensor that nobody comes for: an entry is an address and a length. That the
memory is still there when somebody comes is torch's doing: whatever was shared stays allocated until its consumer's
count is given back, which the lender does for it, because the consumer may not see the file that holds the count.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from syncstack.compat.ticket import Back, Copied, Copy, Lent, Refused, Want, hear, say
from syncstack.errors import HandleRefused, LinkLost, SyncstackError
from syncstack.transports.cuda.driver import Driver
from syncstack.transports.cuda.table import Chunk
from syncstack.wire import unix
from syncstack.wire.link import close_fds
from syncstack.wire.messages import MAX_CHUNK_FDS

log = logging.getLogger(__name__)

SEND_S = 30.0
"""How long a consumer may take to read an answer."""


class Entry(NamedTuple):
    """One shared storage, and what gives torch's count of its consumer back."""

    address: int
    nbytes: int
    device: str
    release: Callable[[], None]


class Lender:
    """One per process. ``lend`` is called by whoever shares; each consumer is served by a thread."""

    def __init__(self, folder: Path, driver: Driver) -> None:
        """Listen in ``folder``. Raises UsageError where that cannot be done."""
        self._driver = driver
        self.path = folder / f"ipc-{secrets.token_hex(8)}.sock"
        self._socket = unix.listen(self.path, kind=socket.SOCK_SEQPACKET, backlog=64)
        self.fd = self._socket.fileno()
        """The listening socket's descriptor, for consumers to try what they may take."""
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="syncstack-lender", daemon=True).start()

    def lend(self, entry: Entry) -> str:
        """The name by which a consumer may ask for an entry, once."""
        name = secrets.token_hex(16)
        with self._lock:
            self._entries[name] = entry
        return name

    def close(self) -> None:
        """Listen no more. Consumers that have connected are served on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), name="syncstack-lend", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        taken: set[str] = set()
        with sock:
            try:
                unix.check_peer(sock)
                while True:
                    message, fds = hear(sock)
                    close_fds(fds)
                    sock.settimeout(SEND_S)
                    self._answer(sock, message, taken)
                    sock.settimeout(None)
            except LinkLost:
                pass
            except SyncstackError as error:
                log.warning("a consumer of shared GPU memory was refused: %s", error)
            finally:
                for name in taken:
                    self._forget(name)  # its mappings went with it

    def _answer(self, sock: socket.socket, message: object, taken: set[str]) -> None:
        if isinstance(message, Back):
            taken.discard(message.entry)
            self._forget(message.entry, counted=message.counted)
            return
        if not isinstance(message, Want | Copy):
            say(sock, Refused(text="an unexpected message"))
            return
        entry = self._entries.get(message.entry)
        if entry is None:
            say(sock, Refused(text="no such entry: it was given back, or the producer was replaced"))
            return
        taken.add(message.entry)
        try:
            if isinstance(message, Want):
                self._give(sock, entry)
            else:
                self._copy(sock, entry)
        except LinkLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer waits to hear it
            say(sock, Refused(text=f"{type(error).__name__}: {error}"[:4000]))

    def _forget(self, name: str, *, counted: bool = False) -> None:
        with self._lock:
            entry = self._entries.pop(name, None)
        if entry is not None and not counted:
            entry.release()

    def _give(self, sock: socket.socket, entry: Entry) -> None:
        driver = self._driver
        driver.bind(entry.device)
        chunks: list[Chunk] = []
        try:
            at = entry.address
            while at < entry.address + entry.nbytes:
                chunks.append(Chunk(driver, at, entry.device))
                if chunks[-1].kind != "fd":
                    raise HandleRefused("plain cudaMalloc memory has no descriptor")
                at = chunks[-1].end
            offset = entry.address - chunks[0].base
            for first in range(0, len(chunks), MAX_CHUNK_FDS):
                batch = chunks[first : first + MAX_CHUNK_FDS]
                self._send(sock, batch, offset, more=first + len(batch) < len(chunks))
        finally:
            for chunk in chunks:
                chunk.release()

    def _send(self, sock: socket.socket, chunks: Sequence[Chunk], offset: int, *, more: bool) -> None:
        fds: list[int] = []
        try:
            fds += (self._driver.export_fd(chunk.name) for chunk in chunks)
            say(sock, Lent(sizes=tuple(chunk.size for chunk in chunks), offset=offset, more=more), tuple(fds))
        finally:
            close_fds(fds)

    def _copy(self, sock: socket.socket, entry: Entry) -> None:
        self._driver.bind(entry.device)
        fd = os.memfd_create("syncstack-ipc", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, entry.nbytes)
            with mmap.mmap(fd, entry.nbytes) as memory:
                into = torch.frombuffer(memory, dtype=torch.uint8)
                into.copy_(self._driver.view(entry.address, entry.nbytes, entry.device, _nothing))
                del into
            say(sock, Copied(), (fd,))
        finally:
            os.close(fd)


def _nothing() -> None:
    """A view of memory that is not ours to unmap."""
