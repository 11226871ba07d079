"""Calls that wait for engines, and end when one of those engines dies."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import TypeVar

from syncstack.errors import EngineUnreachable, LinkLost
from syncstack.refit.target import Target
from syncstack.threads import in_thread

T = TypeVar("T")

WATCH_S = 0.1
"""How often a waiting call looks whether the engine is still there."""


def watched(call: Callable[[], T], targets: Sequence[Target]) -> T:
    """Run ``call``, which uses the links and clients of ``targets`` and keeps deadlines of its own, and return its
    result; end early when the process of one of these engines has gone. Raises what the call does, EngineUnreachable
    or LinkLost."""
    future = in_thread(call, "syncstack-refit")
    while True:
        done, _ = concurrent.futures.wait([future], timeout=WATCH_S)
        if done:
            return future.result()
        for target in targets:
            if target.lost() and not future.done():
                _cut_off(future, target, targets)


def _cut_off(future: concurrent.futures.Future[T], lost: Target, targets: Sequence[Target]) -> None:
    """Give the call a moment to fail by itself, which says more; then take its links and clients away."""
    concurrent.futures.wait([future], timeout=10 * WATCH_S)
    if future.done():
        return
    lost.gone = True
    ended = lost.lease.ended if lost.lease is not None else ""
    for each in targets:
        each.drop_links()
        each.client.reset()
    concurrent.futures.wait([future], timeout=10 * WATCH_S)
    kind = EngineUnreachable if ended else LinkLost
    raise kind(f"engine {lost.client.name} went away", observed=ended or "a worker's data link ended")
