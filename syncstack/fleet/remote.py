"""An engine on another node of the cluster, as its fleet sees it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from syncstack.errors import DeadlineExceeded, EngineUnreachable
from syncstack.fleet.cluster import PLACE_S, ask, kill_host
from syncstack.fleet.host import About
from syncstack.fleet.process import KILL_S

log = logging.getLogger(__name__)

ASK_S = 3.0
"""How long an actor that lives may take to answer."""


class RayEngine:
    """``Supervised``, by the actor in the engine's container."""

    def __init__(self, host: Any, argv: Sequence[str]) -> None:
        """Ask the actor where its engine will be. Raises EngineUnreachable, DeadlineExceeded or UsageError."""
        about = msgspec.json.decode(ask(host, "about", wait_s=PLACE_S), type=About)
        self.name, self.address, self.url = about.name, about.address, about.url
        self._host = host
        self._argv = list(argv)

    def start(self) -> None:
        """See Supervised."""
        try:
            ask(self._host, "start", self._argv, {}, wait_s=ASK_S + KILL_S)
        except DeadlineExceeded as error:
            raise EngineUnreachable(f"{self.name} cannot be started", observed=str(error)) from None

    def ended(self) -> str:
        """See Supervised. An actor that is slow says nothing about its engine: the probe does."""
        try:
            return str(ask(self._host, "ended", wait_s=ASK_S))
        except DeadlineExceeded:
            return ""
        except EngineUnreachable as error:
            return f"its node or its actor is gone: {error.observed}"

    def kill(self) -> None:
        """See Supervised. An engine ends with its actor, and both with their node."""
        try:
            ask(self._host, "kill", wait_s=ASK_S + KILL_S)
        except EngineUnreachable as error:
            log.info("%s has ended with its actor: %s", self.name, error.observed)
        except DeadlineExceeded:
            log.warning("the actor of %s does not answer: it is ended, and its engine with it", self.name)
            kill_host(self._host)
