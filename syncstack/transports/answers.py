"""The sender's ear: what the workers answer while the bytes are still being written."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from concurrent.futures import Future

from syncstack import errors
from syncstack.errors import (
    DeadlineExceeded,
    DigestMismatch,
    LinkError,
    LinkLost,
    ProtocolError,
    SyncstackError,
    TransportError,
)
from syncstack.wire.link import Link, close_fds
from syncstack.wire.messages import Fault, Staged

LOOK_MS = 50
"""How often the writing side is looked at. An answer is seen at once."""


def collect_answers(
    links: Sequence[Link], filling: Future[None], *, session: str, num_tensors: int, wait_s: float
) -> list[Staged]:
    """Wait until every link's worker has verified ``num_tensors`` tensors; returns what they said, in order of links.

    ``filling`` is the work that sends them; from its end on the workers have ``wait_s``. Raises what a worker answers
    instead (TransportError or one of its kinds), LinkLost, or what the filling raised; each as soon as it is known.
    """
    waiting = {link.fileno(): link for link in links}
    if -1 in waiting:
        raise LinkLost("the link is closed", observed="before the weights were sent")
    poller = select.poll()
    for fd in waiting:
        poller.register(fd, select.POLLIN)
    staged: dict[Link, Staged] = {}
    deadline: float | None = None
    while waiting:
        for fd, _ in poller.poll(LOOK_MS):
            link = waiting.pop(fd)
            poller.unregister(fd)
            staged[link] = _answer(link, session, num_tensors, time.monotonic() + wait_s)
        if not filling.done():
            continue
        if filling.exception() is not None:
            _fail(filling, poller, waiting, session, num_tensors)
        deadline = time.monotonic() + wait_s if deadline is None else deadline
        if waiting and time.monotonic() > deadline:
            raise DeadlineExceeded(f"a worker did not verify the weights within {wait_s:g} s after the last of them")
    filling.result()
    return [staged[link] for link in links]


def _fail(filling: Future[None], poller: select.poll, waiting: dict[int, Link], session: str, num_tensors: int) -> None:
    """Raise why the filling ended. A worker that closed its link has often said why before, which says more."""
    if isinstance(filling.exception(), LinkError):
        for fd, _ in poller.poll(0):
            _answer(waiting[fd], session, num_tensors, time.monotonic() + 1.0)
    filling.result()


def _answer(link: Link, session: str, num_tensors: int, deadline: float) -> Staged:
    message, fds = link.receive(deadline=deadline)
    close_fds(fds)
    if isinstance(message, Fault):
        raise _as_error(message)
    if not isinstance(message, Staged) or message.session != session:
        raise ProtocolError("unexpected answer on a data link", observed=type(message).__name__, expected="Staged")
    if message.digests_equal != num_tensors:
        raise DigestMismatch(
            "the worker did not verify every tensor",
            observed=f"{message.digests_equal} tensors",
            expected=f"{num_tensors} tensors",
        )
    return message


def _as_error(fault: Fault) -> SyncstackError:
    """The worker's error again, if it is of a transport; else a TransportError with its text."""
    kind = getattr(errors, fault.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, TransportError)):
        kind = TransportError
    return kind("the engine's worker refused what it was sent: " + fault.text)
