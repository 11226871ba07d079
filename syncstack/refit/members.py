"""The engines of a coordinator: those that take part in its refits, and those that had to be left behind.

An engine that fails is left behind while at least ``least`` others go on. Somebody knocks at its door between two
refits, so that no refit waits for it; once it answers, the next refit takes it in and brings it to the version of all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from syncstack.errors import DeadlineExceeded, EngineError, EngineNotReady, LinkError, SyncstackError, UsageError
from syncstack.refit.client import EngineClient
from syncstack.refit.metrics import metrics
from syncstack.refit.target import Target
from syncstack.settings import Settings
from syncstack.threads import in_thread

log = logging.getLogger(__name__)

SPARE_S = 3.0
"""How long an engine is waited for whose link has ended, where the others can go on without it."""


class Members:
    """Used from the coordinator's thread only."""

    def __init__(self, clients: Sequence[EngineClient], settings: Settings) -> None:
        """Raises UsageError for no client, and for fewer than ``settings.min_engines``."""
        if not clients:
            raise UsageError("a coordinator needs at least one engine", next_step="give --engine")
        self._least = settings.min_engines or len(clients)
        if self._least > len(clients):
            raise UsageError(
                "more engines are needed than there are",
                observed=f"{len(clients)} engines",
                expected=f"SYNCSTACK_MIN_ENGINES = {self._least} or more",
                next_step="lower SYNCSTACK_MIN_ENGINES, or give more --engine",
            )
        self._all = [Target(client) for client in clients]
        self._knock_s = settings.link_s
        self._away: dict[Target, str] = {}
        metrics().engines.set(len(self._all))

    @property
    def live(self) -> list[Target]:
        """Those that take part, in the order in which they were given."""
        return [target for target in self._all if target not in self._away]

    @property
    def away(self) -> dict[str, str]:
        """Why each of the others does not, by name."""
        return {target.client.name: reason for target, reason in self._away.items()}

    def may_leave(self, gone: Sequence[Target]) -> bool:
        """Whether there are some in ``gone``, and enough others."""
        return bool(gone) and len(self.live) - len(gone) >= self._least

    def leave(self, failed: Mapping[Target, SyncstackError], where: str) -> None:
        """Go on without some. ``where`` says when that was."""
        for target, error in failed.items():
            target.end_lease()
            target.drop_links()
            self._away[target] = str(error)
            if target.away_since is None:
                target.away_since = time.monotonic()
                log.warning("%s was left behind in %s: %s", target.client.name, where, error)
            self._knock(target)
        metrics().engines.set(len(self.live))

    def welcome(self) -> None:
        """Take back whoever has answered since the last look; does not wait for anybody."""
        for target in list(self._away):
            assert target.knock is not None
            if not target.knock.done():
                continue
            error = target.knock.exception()
            if error is None:
                del self._away[target]
            else:
                self._away[target] = str(error)
                self._knock(target)
        metrics().engines.set(len(self.live))

    def _knock(self, target: Target) -> None:
        """Nobody else uses its client until that has ended."""
        client = target.client
        target.knock = in_thread(lambda: client.renew(wait_s=self._knock_s), "syncstack-knock")

    def renew_lost(self) -> None:
        """Ask every engine without a living link anew who it is. Raises what ``EngineClient.renew`` does, where the
        others are not enough."""
        for target in self.live:
            if target.links and not target.lost():
                continue
            target.drop_links()
            target.gone = False
            spare = self.may_leave([target])
            try:
                target.client.renew(wait_s=SPARE_S if spare else None)
            except (EngineNotReady, EngineError, LinkError, DeadlineExceeded) as error:
                if not spare:
                    raise
                self.leave({target: error}, "begin")

    def served(self, target: Target, version: int) -> float:
        """``target`` serves ``version``. Returns for how many seconds it had been away; 0 if it had not."""
        if target.away_since is None:
            return 0.0
        seconds, target.away_since = time.monotonic() - target.away_since, None
        log.warning("%s is back with version %d after %.1f s", target.client.name, version, seconds)
        return seconds

    def close(self) -> None:
        """Close every link and connection; a knock that goes on finds the door closed."""
        for target in self._all:
            target.drop_links()
            target.client.close()
