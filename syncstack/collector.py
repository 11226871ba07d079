"""Python's full garbage collection, put off while engines wait.

In a process that holds torch one takes about 100 ms, ten times as long as a version takes to reach a worker over shared
GPU memory (``python -m bench.gpu_fd``), and the objects of a refit bring it about. What is young is still collected.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = (1 << 31) - 1


class _PutOff:
    """For several threads at once: the last to leave brings the collector's own thresholds back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = (0, 0, 0)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = gc.get_threshold()
                gc.set_threshold(*self._before[:2], _NEVER)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and gc.get_threshold() == (*self._before[:2], _NEVER):
                    gc.set_threshold(*self._before)  # unless somebody has set others meanwhile


full_collection_put_off = _PutOff()
"""A context: as long as any thread is in it, no full collection begins by itself. Python 3.14 has no such threshold
and collects step by step: there this does nothing."""
