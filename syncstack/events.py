"""The wait of a host for a GPU: with a deadline, and without holding the interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from syncstack.errors import DeadlineExceeded

POLL_S = 20e-6


class Event(Protocol):
    """What torch.cuda.Event is."""

    def query(self) -> bool:
        """Whether everything before it is done."""
        ...


def await_event(event: Event, *, deadline: float, late: Callable[[], DeadlineExceeded], poll_s: float = POLL_S) -> None:
    """Block until it is done, and raise what ``late`` makes after ``deadline``, a time of ``time.monotonic()``."""
    while not event.query():
        if time.monotonic() > deadline:
            raise late()
        time.sleep(poll_s)
