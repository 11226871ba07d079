"""The engines of a coordinator: those that take part in its refits, and those that do not yet, or not any more.

An engine that fails is left behind while at least ``least`` others go on. Somebody knocks at its door between two
refits, so that no refit waits for it; once it answers, the next refit takes it in and brings it to the version of all.
With a kept version (see ``kept.py``) it is brought to that one as soon as it answers, and serves it until then. An
engine that joins comes in by the same door.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from syncstack.errors import (
    DeadlineExceeded,
    EngineError,
    EngineNotReady,
    EngineUnreachable,
    LinkError,
    SyncstackError,
    UsageError,
)
from syncstack.refit.client import EngineClient
from syncstack.refit.target import Target
from syncstack.settings import Settings
from syncstack.threads import in_thread

log = logging.getLogger(__name__)

SPARE_S = 3.0
"""How long an engine is waited for whose link has ended, where the others can go on without it."""

KNOCK_S = 0.5
"""Between two knocks at a door that is not merely closed."""

RESYNCS = 3
"""How often an engine that answers is tried to be brought to the last version, before it is left to the next refit."""


class Members:
    """Used from the coordinator's thread only, but for ``join``, ``part`` and ``current``."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        settings: Settings,
        *,
        told: Callable[[int], None],
        resync: Callable[[str], int | None] | None = None,
    ) -> None:
        """``resync`` brings the engine at an address to the last version and returns that, None where there is none;
        it is called from other threads. ``told`` hears how many take part. Raises UsageError for no client, and for
        fewer than ``settings.min_engines``.
        """
        if not clients:
            raise UsageError("a coordinator needs at least one engine", next_step="give --engine")
        self._min_engines = settings.min_engines
        if self._min_engines > len(clients):
            raise UsageError(
                "more engines are needed than there are",
                observed=f"{len(clients)} engines",
                expected=f"SYNCSTACK_MIN_ENGINES = {self._min_engines} or more",
                next_step="lower SYNCSTACK_MIN_ENGINES, or give more --engine",
            )
        self._all = [Target(client) for client in clients]
        self._knock_s = settings.link_s
        self._ready_s = settings.engine_ready_s
        self._away: dict[Target, str] = {}
        self._lock = threading.Lock()
        """For ``_all`` and ``_away``, while another thread than the coordinator's looks or lets somebody join."""
        self._parting: set[Target] = set()
        self._closed = threading.Event()
        self._resync = resync
        self._published: int | None = None
        self._told = told
        told(len(self._all))

    @property
    def live(self) -> list[Target]:
        """Those that take part, in the order in which they were given."""
        with self._lock:
            return [target for target in self._all if target not in self._away]

    @property
    def away(self) -> dict[str, str]:
        """Why each of the others does not, by name; without those that were brought to the last version since."""
        with self._lock:
            return {target.client.name: why for target, why in self._away.items() if not self._has_last(target)}

    @property
    def current(self) -> list[str]:
        """The names of those that serve the last version that was published; of none before the first."""
        if self._published is None:
            return []
        with self._lock:
            there = [each for each in self._all if each not in self._parting]
            return [each.client.name for each in there if each not in self._away or self._has_last(each)]

    def _has_last(self, target: Target) -> bool:
        return target.synced is not None and target.synced == self._published

    def may_leave(self, gone: Sequence[Target]) -> bool:
        """Whether there are some in ``gone``, and enough others."""
        return bool(gone) and len(self.live) - len(gone) >= self._needed

    @property
    def _needed(self) -> int:
        """How many must take part: without a setting all but those that have never done so."""
        live = self.live
        return self._min_engines or sum(each in live or each.away_since is not None for each in list(self._all))

    def leave(self, failed: Mapping[Target, SyncstackError], where: str) -> None:
        """Go on without some. ``where`` says when that was."""
        for target, error in failed.items():
            target.end_lease()
            target.drop_links()
            target.synced = None
            with self._lock:
                self._away[target] = str(error)
            if target.away_since is None:
                target.away_since = time.monotonic()
                log.warning("%s was left behind in %s: %s", target.client.name, where, error)
            self._knock(target)
        self._told(len(self.live))

    def join(self, client: EngineClient) -> None:
        """Take another engine in. Its first version is the kept one, at once, or else that of the next refit."""
        target = Target(client)
        with self._lock:
            self._away[target] = "it has joined, and has no version yet"
            self._all.append(target)
        self._knock(target)

    def lost(self, name: str, why: str) -> None:
        """The engine of this name has ended, and is coming back. Not while a refit is on."""
        gone = {each: EngineUnreachable(why) for each in self.live if each.client.name == name}
        self.leave(gone, "between two refits")

    def part(self, name: str) -> None:
        """Go on without the engine of this name from the next refit on; nobody knocks at its door any more."""
        with self._lock:
            self._parting.update(each for each in self._all if each.client.name == name)

    def _part(self) -> None:
        with self._lock:
            parting, self._parting = self._parting, set()
            for target in parting:
                self._all.remove(target)
                self._away.pop(target, None)
        for target in parting:
            target.drop_links()
            target.client.close()

    def welcome(self) -> None:
        """Take in whoever has joined, or has answered again since the last look; waits only where too few would take
        part. Raises UsageError where nobody is left, and EngineNotReady where too few answer."""
        self._part()
        if not self._all:
            raise UsageError("all engines of this coordinator were taken away", next_step="let one join it")
        for target in list(self._away):
            if target.knock is None or not target.knock.done():
                continue  # nobody has knocked where it is just joining
            self._take_in(target)
        deadline = time.monotonic() + self._ready_s
        while len(self.live) < self._needed:
            knocks = {each.knock: each for each in list(self._away) if each.knock is not None}
            done, _ = concurrent.futures.wait(knocks, max(0.0, deadline - time.monotonic()), "FIRST_COMPLETED")
            if not done:
                raise EngineNotReady(
                    "too few engines take part in the refit",
                    observed="; ".join([f"{len(self.live)}", *(f"{name}: {why}" for name, why in self.away.items())]),
                    expected=f"{self._needed}",
                    next_step="look at the logs of those that are missing, or lower SYNCSTACK_MIN_ENGINES",
                )
            for knock in done:
                self._take_in(knocks[knock])
        self._told(len(self.live))

    def _take_in(self, target: Target) -> None:
        assert target.knock is not None
        target.knock.result()
        with self._lock:
            del self._away[target]

    def _knock(self, target: Target) -> None:
        """Nobody else uses its client until that has ended, which it does once the next refit may take it in."""

        def knock() -> None:
            tries = 0
            while not self._closed.is_set() and target in self._all:
                try:
                    target.client.renew(wait_s=self._knock_s)
                    tries += 1
                    self._bring(target)
                    return
                except Exception as error:  # noqa: BLE001 - whatever it is, somebody has to hear of it
                    if tries >= RESYNCS or not isinstance(error, SyncstackError):
                        log.warning("%s was not brought to the last version: %r", target.client.name, error)
                        return
                    with self._lock:
                        if target in self._away:
                            self._away[target] = str(error)
                self._closed.wait(KNOCK_S)

        target.knock = in_thread(knock, "syncstack-knock")

    def _bring(self, target: Target) -> None:
        version = None if self._resync is None else self._resync(target.client.address)
        if version is not None:
            self.served(target, version)
            target.synced = version

    def published(self, version: int) -> None:
        """All that take part serve ``version``. Who was brought to the one before meanwhile is brought to this one."""
        self._published = version
        for target in list(self._away):
            if target.synced is not None and target.knock is not None and target.knock.done():
                self._knock(target)

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
        self._closed.set()
        for target in self._all:
            target.drop_links()
            target.client.close()
