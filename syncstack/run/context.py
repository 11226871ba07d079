"""What a training job gets from the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from syncstack.refit.report import RefitReport
from syncstack.run.recorder import Recorder


class Refits(Protocol):
    """What a job needs of ``syncstack.Coordinator``: moving the source's present weights into all engines."""

    def refit(self, version: int) -> list[RefitReport]:
        """One report for each engine. Blocks for the transaction; raises RefitFailed and others of the tree."""
        ...

    @property
    def current(self) -> list[str]:
        """Names of the engines that serve the last version now; one that came back between two refits is among them."""
        ...

    def close(self) -> None:
        """Release what the coordinator holds. Engines that somebody else started keep serving."""
        ...


class RunContext:
    """One run: its options, its connected engines, its recorder. A job is a function of this and nothing else."""

    def __init__(
        self,
        *,
        settings: Any,
        engines: Sequence[Any],
        engine_urls: Sequence[str],
        model: Path,
        steps: int,
        seed: int,
        out: Path,
        recorder: Recorder,
        make_coordinator: Callable[[Any], Refits],
    ) -> None:
        self.settings = settings
        self.engines = engines
        """Connected ``EngineClient`` objects."""
        self.engine_urls = engine_urls
        """Where each engine's OpenAI-compatible API answers, in the order of ``engines``."""
        self.model = model
        """A checked Hugging Face folder."""
        self.steps = steps
        self.seed = seed
        self.out = out
        """The run's own folder; the job may write into it."""
        self.recorder = recorder
        self._make_coordinator = make_coordinator

    @contextmanager
    def coordinator(self, source: Any) -> Iterator[Refits]:
        """A coordinator that moves ``source`` into all engines of the run; closed at the end of the block."""
        coordinator = self._make_coordinator(source)
        try:
            yield coordinator
        finally:
            coordinator.close()
