"""One version on its way: its clock, and what it has produced so far."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from syncstack.refit.pace import Stage


class Progress:
    """Of one call of ``refit``."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.session = secrets.token_hex(16)
        self.started = time.perf_counter()
        self.phase = "begin"
        self.phases: dict[str, float] = {}
        self.tensors = 0
        self.digests_equal = 0
        """Tensors that every worker has verified."""
        self.stage: Stage | None = None
        self.slow = ""
        """Why the bytes moved slower than expected; empty if they did not."""
        self.staging = False
        """Whether bytes may have been written."""

    @property
    def where(self) -> str:
        """The phase and the version, for a log line."""
        return f"{self.phase} of version {self.version}"

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """The length of the block is the length of the phase."""
        self.phase = phase
        self.staging = self.staging or phase == "stage"
        begin = time.perf_counter()
        yield
        self.phases[phase] = time.perf_counter() - begin
