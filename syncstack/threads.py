"""Threads, and what would stop all of them."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run ``call`` in a thread of its own; the future has its result, or whatever it raised.

    A daemon: a call that hangs in the kernel must not keep the process from ending.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting thread raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile, unless somebody else asks for one: in a process that has imported torch a full
    one takes 90 ms, more than what is done here. It only comes later."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
