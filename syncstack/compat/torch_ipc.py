"""``torch.multiprocessing`` shares CUDA tensors in expandable segments where a filter denies ``pidfd_getfd``, and any
CUDA tensors across PID namespaces.

``install()`` in both processes, before anything is shared; nothing else changes. It puts itself under torch's own
reductions, at the two methods of a storage that make and open a handle, so that whatever is built on them (SGLang's,
vLLM's and verl's own reductions too) goes this way. Where torch's own way works, that way is taken.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from syncstack.compat.borrower import Borrower
from syncstack.compat.lender import Entry, Lender
from syncstack.compat.ticket import MAGIC, Ticket, pack, unpack
from syncstack.errors import SyncstackError, UsageError
from syncstack.settings import Settings
from syncstack.transports import pidfd
from syncstack.transports.cuda.driver import Driver, load_driver
from syncstack.wire import unix

log = logging.getLogger(__name__)

TESTED_WITH = ("2.11.", "2.13.")
"""Torch releases that this was tested with: on a GPU, and without one."""


class _Patch:
    """What is installed in this process."""

    def __init__(self, folder: Path, driver: Callable[[], Driver]) -> None:
        self._folder = folder
        self._load = driver
        self._lock = threading.Lock()
        self._lender: tuple[Driver, Lender] | None = None
        self._borrower: Borrower | None = None
        self._warned = False
        own = vars(torch.UntypedStorage)
        self.before = {name: own.get(name) for name in ("_share_cuda_", "_new_shared_cuda")}
        self.share: Any = torch.UntypedStorage._share_cuda_
        self.open: Any = torch.UntypedStorage._new_shared_cuda

    def lending(self) -> tuple[Driver, Lender]:
        """The lender, from the first tensor that is shared on. Raises UsageError or TransportError."""
        with self._lock:
            if self._lender is None:
                driver = self._load()
                unix.prepare_folder(self._folder)
                self._lender = driver, Lender(self._folder, driver)
            return self._lender

    def borrowing(self) -> Borrower:
        """The borrower, from the first tensor that is opened on."""
        with self._lock:
            if self._borrower is None:
                self._borrower = Borrower(self._load)
            return self._borrower

    def shared(self, storage: Any, *args: Any, **parts: Any) -> Any:
        """In place of ``_share_cuda_``: torch's own answer, with a ticket for its handle."""
        found = self.share(storage, *args, **parts)
        device, handle, size, offset, counter, counter_offset, event, waits = found
        if not handle or not size:
            return found
        try:
            ticket = self._ticket(storage, handle, counter, counter_offset)
        except SyncstackError as error:
            if not self._warned:
                self._warned = True
                log.warning("GPU memory is shared by torch's own handles: %s", error)
            return found
        if waits:
            # An event cannot be opened everywhere either: whatever is to be waited for is waited for here.
            torch.cuda.current_stream(device).synchronize()
        return device, pack(ticket), size, offset, counter, counter_offset, event, False

    def _ticket(self, storage: Any, handle: bytes, counter: bytes, counter_offset: int) -> Ticket:
        driver, lender = self.lending()
        device = driver.device_of(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        driver.bind(device)
        address, nbytes = storage.data_ptr(), storage.nbytes()
        release: Any = partial(torch.UntypedStorage._release_ipc_counter_cuda, counter, counter_offset)
        return Ticket(
            native=bytes(handle),
            pidfd=driver.kind(address) == "fd",
            process=pidfd.numbers(),
            fd=lender.fd,
            socket=str(lender.path),
            entry=lender.lend(Entry(address, nbytes, device, release)),
            device=device,
            nbytes=nbytes,
        )

    def opened(self, device: Any, handle: bytes, *rest: Any) -> Any:
        """In place of ``_new_shared_cuda``."""
        if not handle.startswith(MAGIC):
            return self.open(device, handle, *rest)
        ticket, borrower = unpack(handle), self.borrowing()
        if borrower.works_natively(ticket):
            found = self.open(device, ticket.native, *rest)
            borrower.counted(ticket)
            return found
        return borrower.open(ticket).untyped_storage()

    def close(self) -> None:
        """Lend nothing more."""
        if self._lender is not None:
            self._lender[1].close()


_INSTALLED: list[_Patch] = []
"""At most one."""


def install(*, folder: Path | None = None, driver: Callable[[], Driver] = load_driver) -> None:
    """Let torch's sharing of CUDA tensors work in a locked-down container. Called twice: nothing more happens.

    ``folder`` is where this process listens; both must see it, as one user. Left out: ``ipc`` in SYNCSTACK_SOCKET_DIR
    if that can be used, else a folder of this user in the one for temporary files. Call it before the first tensor is
    shared, in the producer and in every consumer. Does not touch a GPU. Raises UsageError for a folder that was given
    and cannot be used.
    """
    if _INSTALLED:
        return
    if not torch.__version__.startswith(TESTED_WITH):
        log.warning("torch %s was not tested with; tested: %s", torch.__version__, ", ".join(TESTED_WITH))
    patch = _Patch(_usable(folder), driver)

    def share(self: Any, *args: Any, **parts: Any) -> Any:
        return patch.shared(self, *args, **parts)

    _INSTALLED.append(patch)
    torch.UntypedStorage._share_cuda_ = share  # type: ignore[method-assign]
    torch.UntypedStorage._new_shared_cuda = staticmethod(patch.opened)  # type: ignore[method-assign]


def uninstall() -> None:
    """Undo ``install``. What has been opened stays open, and what was shared stays lent to those who have come."""
    while _INSTALLED:
        patch = _INSTALLED.pop()
        for name, before in patch.before.items():
            if before is None:
                delattr(torch.UntypedStorage, name)  # torch's own is that of a base class
            else:
                setattr(torch.UntypedStorage, name, before)
        patch.close()


def _usable(folder: Path | None) -> Path:
    if folder is not None:
        unix.prepare_folder(folder)
        return folder
    shared = Settings.load().socket_dir / "ipc"
    try:
        unix.prepare_folder(shared)
    except UsageError:
        private = Path(tempfile.gettempdir()) / f"syncstack-ipc-{os.geteuid()}"
        unix.prepare_folder(private)
        return private
    return shared
