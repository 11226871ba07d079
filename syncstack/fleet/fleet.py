"""Engines that are started, watched and brought back, and the refits into them.

One lock serialises refits and recovery: nobody ends or starts an engine while a version is on its way, and a refit
begins with engines that are known. Nothing that takes long is done under it but a refit: an engine that was started
again loads its model, and is brought to the last version, while training and the other engines go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Self

from syncstack.errors import EngineError, FleetTooSmall, LinkError, RefitFailed, SyncstackError, UsageError
from syncstack.fleet.states import EngineState, Policy, State
from syncstack.fleet.supervised import Supervised
from syncstack.fleet.watch import Watch
from syncstack.refit.client import EngineClient
from syncstack.refit.coordinator import Coordinator
from syncstack.refit.report import RefitReport
from syncstack.settings import Settings
from syncstack.weights.source import WeightSource

log = logging.getLogger(__name__)

POLL_S = 0.05

ANSWERING = (State.HEALTHY, State.STALE, State.DIRTY)
"""Who can take part in a refit."""


class Fleet:
    """Engines of one trainer. ``start``, ``refit`` and ``close`` are called from one thread, ``states``, ``add`` and
    ``remove`` from any."""

    def __init__(
        self,
        engines: Sequence[Supervised],
        *,
        settings: Settings,
        policy: Policy | None = None,
        stay: bool = False,
    ) -> None:
        """Nothing is started yet. ``settings.min_engines``: fewer that live end the training (0: all are needed).
        ``stay``: engines that have a version are left serving it by ``close``. Raises UsageError for two engines of one
        name."""
        names = [engine.name for engine in engines]
        if len(set(names)) < len(names) or not names:
            raise UsageError(
                "a fleet needs engines with names of their own",
                observed=", ".join(names) or "none",
                next_step="name each engine apart",
            )
        self.recovery = threading.Lock()
        self.records = threading.Lock()
        self.published: int | None = None
        self.refits = 0
        self.refitting = False
        self._settings = settings
        # An engine that dies under a refit cannot come back before that has ended: see `recovery`.
        brief = {"engine_ready_s": min(settings.engine_ready_s, settings.link_s), "keep_version": True}
        self._brief = settings.model_copy(update=brief)
        self._policy = policy or Policy()
        self._watches = {engine.name: Watch(engine, self._policy, self) for engine in engines}
        self._stay = stay
        self._members: set[str] = set()
        self._clients: list[EngineClient] = []
        self._coordinator: Coordinator | None = None

    def start(self) -> None:
        """Start all engines and wait until enough of them answer. Raises FleetTooSmall; all are ended then."""
        try:
            for watch in self._watches.values():
                watch.start()
            self._await_enough(time.monotonic() + self._policy.first_wait_s, all_of_them=True)
        except BaseException:
            self.close()
            raise

    def connect(self) -> list[EngineClient]:
        """Ask each engine that answers what it holds; ``attach`` does it where nobody has. Raises what
        ``EngineClient.connect`` does."""
        names = [name for name, watch in self._watches.items() if watch.record.state in ANSWERING]
        try:
            for name in names:
                self._clients.append(EngineClient.connect(self._watches[name].engine.address, settings=self._brief))
        except BaseException:
            self._disconnect()
            raise
        return list(self._clients)

    def _disconnect(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def attach(self, source: WeightSource) -> None:
        """Take the trainer's weights from ``source`` from now on. Raises what ``EngineClient.connect`` does."""
        clients = list(self._clients) or self.connect()
        self._members = {client.name for client in clients}  # before there is a coordinator that they could join again
        try:
            self._coordinator = Coordinator(source=source, engines=clients, settings=self._brief)
        except BaseException:
            self._disconnect()
            raise
        self._clients = []  # they are the coordinator's

    @property
    def coordinator(self) -> Coordinator:
        """Of the attached source. Its ``refit`` is not to be called: the fleet's is."""
        if self._coordinator is None:
            raise UsageError("this fleet has no weights to send", next_step="call attach(source) first")
        return self._coordinator

    @property
    def current(self) -> list[str]:
        """Names of the engines that serve the last version now. From any thread."""
        return self.coordinator.current

    def url(self, name: str) -> str:
        """Of an engine's own server."""
        return self._watches[name].engine.url

    def states(self) -> list[EngineState]:
        """What is known of each engine now."""
        with self.records:
            return [watch.record.snapshot() for watch in self._watches.values()]

    def refit(self, version: int) -> list[RefitReport]:
        """Move the source's weights into every engine that lives, as ``version``; it is published when all that take
        part have it. Blocks.

        An engine that dies meanwhile is left behind, or, where too few are left, waited for: for
        ``settings.engine_ready_s`` in all, then FleetTooSmall. Raises what ``Coordinator.refit`` does otherwise.
        """
        deadline = time.monotonic() + self._settings.engine_ready_s
        while True:
            self._await_enough(deadline)
            try:
                with self.recovery:
                    return self._refit(version)
            except (RefitFailed, EngineError, LinkError) as error:
                if not self._look_for_dead() or time.monotonic() >= deadline:
                    raise
                log.warning("version %d is tried again once enough engines are back: %s", version, error)

    def _refit(self, version: int) -> list[RefitReport]:
        with self.records:
            self.refitting = True
            self.refits += 1
            for watch in self._watches.values():
                if watch.engine.name in self._members:
                    watch.record.updating(time.monotonic())
        reports: list[RefitReport] = []
        try:
            reports = self.coordinator.refit(version)
            self.published = version
        finally:
            have = {report.engine for report in reports}
            with self.records:
                now = time.monotonic()
                for name, watch in self._watches.items():
                    if name in have:
                        watch.record.updated(version, now)
                    else:
                        watch.record.passed(now)
                self.refitting = False
        return reports

    def _look_for_dead(self) -> list[str]:
        """Names of the engines whose process has ended, without waiting for the next probe."""
        dead = []
        for name, watch in list(self._watches.items()):
            ended = watch.engine.ended()
            with self.records:
                if ended:
                    watch.record.ended(ended, time.monotonic())
                if watch.record.state in (State.DEAD, State.RESTARTING):
                    dead.append(name)
        return dead

    def _await_enough(self, deadline: float, *, all_of_them: bool = False) -> None:
        """Until ``settings.min_engines`` answer, and with ``all_of_them`` nobody else is still coming."""
        while True:
            self._look_for_dead()
            found = self.states()
            least = self._settings.min_engines or len(found)
            answering = sum(each.state in ANSWERING for each in found)
            coming = sum(not each.lost for each in found) - answering
            enough = answering >= least
            if enough and not (all_of_them and coming):
                return
            if answering + coming < least or time.monotonic() >= deadline:
                if enough:
                    return
                raise FleetTooSmall(
                    "too few engines live",
                    observed="; ".join(f"{each.name} {each.state} {each.reason}".rstrip() for each in found),
                    expected=f"{least} that answer",
                    consequence="Training cannot go on",
                    next_step="look at the engines' logs, or lower SYNCSTACK_MIN_ENGINES",
                )
            time.sleep(POLL_S)

    def add(self, engine: Supervised) -> None:
        """Start another engine; it is brought to the last version as soon as it answers. Raises UsageError for a name
        that is taken."""
        if engine.name in self._watches:
            raise UsageError(f"there is an engine of the name {engine.name} already", next_step="choose another name")
        watch = Watch(engine, self._policy, self)
        with self.records:
            self._watches[engine.name] = watch
        watch.start()

    def remove(self, name: str) -> None:
        """End an engine; the next refit goes on without it. Raises UsageError for a name that is not known."""
        if name not in self._watches:
            raise UsageError(f"there is no engine of the name {name}", expected=", ".join(self._watches))
        with self.recovery:
            if self._coordinator is not None and name in self._members:
                self._coordinator.part(name)
            with self.records:
                watch = self._watches.pop(name)
                self._members.discard(name)
        watch.close()

    def lost(self, name: str, reason: str) -> None:
        """See Surroundings."""
        if self._coordinator is not None and name in self._members:
            self._coordinator.lost(name, reason)

    def answers(self, watch: Watch) -> None:
        """See Surroundings."""
        if self._coordinator is None or watch.engine.name in self._members:
            return
        try:
            client = EngineClient.connect(watch.engine.address, settings=self._brief)
        except SyncstackError as error:
            log.warning("%s cannot join: %s", watch.engine.name, error)
            return
        self._members.add(watch.engine.name)
        self._coordinator.join(client)

    def close(self) -> None:
        """End all engines and what belongs to them; those that may stay are watched no more. Raises DeadlineExceeded
        for one that the kernel does not end, after all the others."""
        with contextlib.ExitStack() as stack:
            for watch in self._watches.values():
                watch.stop()
                stack.callback(watch.close, leave=self._stay and self.published is not None)
            stack.callback(self._disconnect)
            if self._coordinator is not None:
                stack.callback(self._coordinator.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
