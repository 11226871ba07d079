"""The order between the caller's GPU work and whatever reads its results.

The threads that read a source are not the caller's, and torch's current stream belongs to the thread: without an event
their copies may overtake the kernels that make the weights (pytorch/pytorch#16926). A host that waits is enough: the
digest needs the finished values anyway.
"""

from __future__ import annotations

import time

import torch

from syncstack.errors import DeadlineExceeded
from syncstack.events import Event, await_event

POLL_S = 100e-6


def mark() -> Event | None:
    """An event behind all that was submitted to the calling thread's current stream, on its current device; None where
    this process has not used a GPU. Other streams are the caller's to join first, as for any other reader."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()  # type: ignore[attr-defined]
    return event


def await_done(event: Event | None, *, wait_s: float) -> None:
    """Block until it is done. Raises DeadlineExceeded after ``wait_s``."""
    if event is None:
        return

    def late() -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the GPU has not finished what the trainer asked of it before the refit within {wait_s:g} s",
            consequence="Nothing was read from the weights",
            next_step="look for a kernel or a collective that hangs on the trainer's current stream",
        )

    await_event(event, deadline=time.monotonic() + wait_s, late=late, poll_s=POLL_S)
