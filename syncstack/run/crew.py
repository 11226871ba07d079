"""The engines of a run: those that its user named, or a fleet that ``syncstack launch`` has placed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from syncstack.errors import SyncstackError
from syncstack.refit.client import EngineClient
from syncstack.refit.coordinator import Coordinator
from syncstack.run.context import Refits
from syncstack.settings import Settings
from syncstack.weights.source import WeightSource

log = logging.getLogger(__name__)


class Crew:
    """Connected engines, and what moves weights into them."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        urls: Sequence[str],
        make_coordinator: Callable[[WeightSource], Refits],
    ) -> None:
        self.engines = engines
        self.urls = urls
        """Where each engine's OpenAI-compatible API answers, in the order of ``engines``."""
        self.make_coordinator = make_coordinator

    def end(self) -> None:
        """End each engine's server. One that cannot be reached is said and left."""
        for engine in self.engines:
            try:
                engine.reset()  # the job may have closed its connections
                engine.end()
            except SyncstackError as error:
                log.warning("engine %s was not ended: %s", engine.name, error)


@contextmanager
def named(addresses: Sequence[str], urls: Sequence[str], settings: Settings) -> Iterator[Crew]:
    """Engines that somebody else starts. Raises what ``EngineClient.connect`` does."""
    with contextlib.ExitStack() as stack:
        engines = []
        for address in addresses:  # one by one: what is connected gets closed
            engines.append(EngineClient.connect(address, settings=settings))
            stack.callback(engines[-1].close)
        yield Crew(engines, urls, lambda source: Coordinator(source=source, engines=engines, settings=settings))
