"""One thread for each engine: looks whether it generates, and starts it again when it does not."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from syncstack.errors import EngineUnreachable
from syncstack.fleet.probe import NoAnswer, Probe
from syncstack.fleet.states import EngineRecord, Policy, State
from syncstack.fleet.supervised import Supervised

log = logging.getLogger(__name__)


class Surroundings(Protocol):
    """What a watch needs of its fleet."""

    recovery: threading.Lock
    """Held by a refit and by whoever ends or starts an engine: never both."""
    records: threading.Lock
    """For a moment, by whoever looks at a record or changes it."""
    published: int | None
    refits: int
    """How many refits have begun."""
    refitting: bool

    def lost(self, name: str, reason: str) -> None:
        """An engine was ended and is about to be started again. Called with ``recovery`` held."""
        ...

    def answers(self, watch: Watch) -> None:
        """An engine answers a probe. Called with no lock held."""
        ...


class Watch:
    """One engine, its record and the thread."""

    def __init__(self, engine: Supervised, policy: Policy, fleet: Surroundings) -> None:
        self.engine = engine
        self.record = EngineRecord(engine.name, policy, time.monotonic())
        self._policy = policy
        self._fleet = fleet
        self._probe = Probe(engine.url, policy.timeout_s)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"syncstack-watch-{engine.name}", daemon=True)

    def start(self) -> None:
        """Start the engine, and watch it from now on."""
        self.engine.start()
        self._thread.start()

    def stop(self) -> None:
        """Watch it no more; does not wait."""
        self._over.set()

    def close(self, *, leave: bool = False) -> None:
        """Watch it no more, and end it, unless it shall be left running. Raises what ``Supervised.kill`` does."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(self._policy.timeout_s * 2)
        if not leave:
            self.engine.kill()
        self._probe.close()

    def _run(self) -> None:
        while not self._over.wait(self._policy.interval_s):
            try:
                self._look()
                self._recover()
            except Exception:
                log.exception("%s could not be watched", self.engine.name)

    def _look(self) -> None:
        """One probe. What is found while a refit is on, or one has begun since, says nothing about the engine."""
        fleet = self._fleet
        refits = fleet.refits
        if fleet.refitting or self.record.state is State.DEAD:
            return
        ended = self.engine.ended()
        answer, why = None, ""
        if not ended:
            try:
                answer = self._probe.ask()
            except NoAnswer as error:
                why = str(error)
                ended = self.engine.ended()
        with fleet.records:
            if fleet.refitting or fleet.refits != refits:
                return
            now, before = time.monotonic(), self.record.state
            if ended:
                self.record.ended(ended, now)
            elif answer is None:
                self.record.missed(why, now)
            elif answer.dirty:
                self.record.refused(answer.dirty, now)
            else:
                self.record.answered(answer.version, now, published=fleet.published, serves=answer.serves)
            self._tell(before)
        if answer is not None:
            fleet.answers(self)

    def _recover(self) -> None:
        """End what is dead and start it again, once its time has come and no refit is on."""
        fleet = self._fleet
        with fleet.records:
            due = self.record.may_restart(time.monotonic())
        if not due or not fleet.recovery.acquire(blocking=False):
            return
        try:
            self.engine.kill()
            fleet.lost(self.engine.name, self.record.reason)
            self.engine.start()
            with fleet.records:
                self.record.restarting(time.monotonic())
            log.warning("%s is started again (%d)", self.engine.name, self.record.restarts)
        except EngineUnreachable as error:
            with fleet.records:
                self.record.postponed(str(error), time.monotonic())
        finally:
            fleet.recovery.release()

    def _tell(self, before: State) -> None:
        record = self.record
        if record.state is before:
            return
        if record.state is State.DEAD:
            more = "; its restarts are spent" if record.lost else ""
            log.warning("%s is dead: %s%s", record.name, record.reason, more)
        elif record.state is State.DIRTY:
            log.warning("%s is dirty: %s", record.name, record.reason)
        elif before in (State.STARTING, State.RESTARTING, State.DIRTY):
            log.info("%s answers with version %s", record.name, record.version)
