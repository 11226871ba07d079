"""A call in a daemon thread: one that hangs in the kernel must not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run ``call`` in a thread of its own; the future has its result, or whatever it raised."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting thread raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
