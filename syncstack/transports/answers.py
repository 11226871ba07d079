"""The sender's ear: what the workers answer while the bytes are still being written."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from syncstack import errors
from syncstack.errors import (
    DeadlineExceeded,
    DigestMismatch,
    GroupLost,
    LinkError,
    LinkLost,
    ProtocolError,
    SyncstackError,
    TransportError,
)
from syncstack.wire.link import Link, close_fds
from syncstack.wire.messages import Fault, Message, Staged

WHY_S = 0.3
"""How long the members of a group that broke are given to say why."""

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

    def hear(fd: int) -> None:
        link = waiting.pop(fd)
        poller.unregister(fd)
        staged[link] = _answer(link, session, num_tensors, time.monotonic() + wait_s)

    try:
        _collect(poller, waiting, filling, hear, wait_s)
    except GroupLost as lost:
        raise _why(poller, waiting, hear) or lost from None
    return [staged[link] for link in links]


def _collect(
    poller: select.poll, waiting: Mapping[int, Link], filling: Future[None], hear: Callable[[int], None], wait_s: float
) -> None:
    """Hear every worker out, and raise why the filling ended if it did not end well."""
    deadline: float | None = None
    while waiting:
        for fd, _ in poller.poll(LOOK_MS):
            hear(fd)
        if not filling.done():
            continue
        if isinstance(filling.exception(), LinkError):
            for fd, _ in poller.poll(0):
                hear(fd)  # a worker that closed its link has often said why before, which says more
        filling.result()
        deadline = time.monotonic() + wait_s if deadline is None else deadline
        if waiting and time.monotonic() > deadline:
            raise DeadlineExceeded(f"a worker did not verify the weights within {wait_s:g} s after the last of them")
    filling.result()


def _why(poller: select.poll, waiting: Mapping[int, Link], hear: Callable[[int], None]) -> SyncstackError | None:
    """Why a group broke, if one of its members tells within ``WHY_S``: most only saw that another left."""
    deadline = time.monotonic() + WHY_S
    while waiting and time.monotonic() < deadline:
        for fd, _ in poller.poll(LOOK_MS):
            try:
                hear(fd)
            except GroupLost:
                continue
            except SyncstackError as error:
                return error
    return None


def _answer(link: Link, session: str, num_tensors: int, deadline: float) -> Staged:
    message, fds = link.receive(deadline=deadline)
    close_fds(fds)
    raise_fault(message)
    if not isinstance(message, Staged) or message.session != session:
        raise ProtocolError("unexpected answer on a data link", observed=type(message).__name__, expected="Staged")
    if message.digests_equal != num_tensors:
        raise DigestMismatch(
            "the worker did not verify every tensor",
            observed=f"{message.digests_equal} tensors",
            expected=f"{num_tensors} tensors",
        )
    return message


def raise_fault(message: Message) -> None:
    """Raise what a worker answers instead of what was asked for."""
    if isinstance(message, Fault):
        raise _as_error(message)


def _as_error(fault: Fault) -> SyncstackError:
    """The worker's error again, if it is of a transport; else a TransportError with its text."""
    kind = getattr(errors, fault.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, TransportError)):
        kind = TransportError
    return kind("the engine's worker refused what it was sent: " + fault.text)
