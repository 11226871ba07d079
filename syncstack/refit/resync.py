"""An engine that comes back, or is new, is brought to the last version while the trainer is at its next step.

By a way that needs nobody else: no group is made anew for it, and no other engine stops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from syncstack.refit.client import EngineClient
from syncstack.refit.kept import KeptVersion
from syncstack.settings import Settings

log = logging.getLogger(__name__)

ALONE = "cuda_fd,cuda_ipc,host_fd,stream"
"""Transports between one trainer process and one engine."""

Refit = Callable[[KeptVersion, EngineClient, Settings, int], object]
"""Bring one engine to a version, by a coordinator of its own."""


class Resync:
    """One for each coordinator that keeps its versions. Called from a thread for each engine; one at a time, because
    they share the kept version."""

    def __init__(self, kept: KeptVersion, settings: Settings, refit: Refit) -> None:
        self._kept = kept
        wanted = [name for name in settings.transport.split(",") if name.strip() != "collective"]
        ways = ALONE if settings.transport == "auto" else ",".join(wanted) or "stream"
        alone = {"min_engines": 0, "keep_version": False, "transport": ways}
        self._settings = settings.model_copy(update=alone)
        self._refit = refit

    def __call__(self, address: str) -> int | None:
        """Bring the engine at ``address`` to the kept version and return that; None where there is none.

        Blocks, also for a refit that is on: what it brings is what is kept after it. Raises what a refit does.
        """
        with self._kept.lock:
            version = self._kept.version
            if version is None:
                return None
            client = EngineClient.connect(address, settings=self._settings)
            try:
                self._refit(self._kept, client, self._settings, version)
            finally:
                client.close()
        log.info("engine %s was brought to version %d", client.name, version)
        return version
