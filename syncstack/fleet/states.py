"""The state of one engine as its fleet sees it. Every transition is here, and nowhere else.

::

                 answers                     refit begins                 refit has it
    STARTING ------------> STALE(version) ----------------> UPDATING -------------------> HEALTHY(version)
                             ^    |                          |    ^                        |    |
                             |    | brought to the last      |    |      refit begins      |    |
                             |    +------------------------> | ---+<-----------------------+    |
                             |      version: HEALTHY         |                                  |
                             +-------------------------------+ left behind                      |
                             |                               +--------------> DIRTY             |
                             +------------------------------------------------------------------+
                               a version was published without it

    any of them --- process ended, or too many misses ---> DEAD ---> RESTARTING --- answers ---> STALE(version)

DEAD is also where an engine stays whose restarts are spent. A version is never one that is on its way.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Self

import msgspec

from syncstack.settings import Settings


class State(enum.StrEnum):
    """Where an engine is in its fleet's eyes."""

    STARTING = "starting"
    HEALTHY = "healthy"
    UPDATING = "updating"
    STALE = "stale"
    DIRTY = "dirty"
    DEAD = "dead"
    RESTARTING = "restarting"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """When an engine counts as dead, and what is done then. Seconds."""

    first_wait_s: float = 300.0
    """How long an engine that was started may take to answer for the first time."""
    interval_s: float = 5.0
    """Between two probes of one engine."""
    timeout_s: float = 20.0
    """How long a probe, one generated token, may take."""
    misses: int = 3
    """Probes in a row that may fail before the engine is dead."""
    backoff_s: float = 1.0
    """Wait before the first restart; twice as long before each one after it."""
    backoff_max_s: float = 60.0
    restarts: int = 5
    """Restarts of one engine within ``window_s``; after that it stays dead."""
    window_s: float = 3600.0
    start_tries: int = 2
    """Starts of an engine that has never answered: what fails at once and again is an option, and not bad luck."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """As the environment says."""
        return cls(
            first_wait_s=settings.probe_first_s,
            interval_s=settings.probe_interval_s,
            timeout_s=settings.probe_timeout_s,
            misses=settings.probe_misses,
            backoff_s=settings.restart_backoff_s,
            backoff_max_s=settings.restart_backoff_max_s,
            restarts=settings.restarts,
            window_s=settings.restart_window_s,
            start_tries=settings.start_tries,
        )


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one engine's record."""

    name: str
    state: State
    version: int | None
    """Of the weights that it serves or would serve; None before anybody knows."""
    reason: str
    """Why it is dirty or dead."""
    since: float
    """On the clock that the record was given: when it came to this state."""
    restarts: int
    """How often it was started again."""
    lost: bool
    """Dead for good: its restarts are spent."""


_ANSWERING = frozenset({State.HEALTHY, State.UPDATING, State.STALE, State.DIRTY})
_COMING = frozenset({State.STARTING, State.RESTARTING})


class EngineRecord:
    """One engine's. ``now`` is always a monotonic clock's; not thread-safe, does no I/O."""

    def __init__(self, name: str, policy: Policy, now: float) -> None:
        self.name = name
        self.state = State.STARTING
        self.version: int | None = None
        self.reason = ""
        self.since = now
        self.misses = 0
        self.restarts = 0
        self._policy = policy
        self._recent: deque[float] = deque()
        self._answered = False

    @property
    def lost(self) -> bool:
        """Whether it is dead for good."""
        hopeless = not self._answered and self.restarts + 1 >= self._policy.start_tries
        return self.state is State.DEAD and (hopeless or len(self._recent) >= self._policy.restarts)

    def answered(self, version: int, now: float, *, published: int | None, serves: bool) -> None:
        """A probe came back. ``serves``: it generated, with the weights of ``version``; else it refused, because it
        waits for its first version or because one is on its way."""
        if self.state is State.DEAD:
            return  # it is about to be killed: what it says does not matter any more
        self.misses = 0
        self._answered = True
        self.version = version
        current = serves and version == published
        if self.state is not State.UPDATING:
            self._to(State.HEALTHY if current else State.STALE, now)

    def refused(self, reason: str, now: float) -> None:
        """A probe came back: its weights may be mixed."""
        if self.state is not State.DEAD:
            self.misses = 0
            self._answered = True
            self._to(State.DIRTY, now, reason)

    def missed(self, reason: str, now: float) -> None:
        """A probe did not come back."""
        if self.state is State.DEAD:
            return
        if self.state in _COMING:
            if now - self.since >= self._policy.first_wait_s:
                self.ended(f"it did not answer within {self._policy.first_wait_s:g} s: {reason}", now)
            return
        self.misses += 1
        if self.misses >= self._policy.misses:
            self.ended(f"{self.misses} probes in a row failed: {reason}", now)

    def ended(self, reason: str, now: float) -> None:
        """Its process ended, or it is to be taken for dead."""
        if self.state is not State.DEAD:
            self._to(State.DEAD, now, reason)

    def updating(self, now: float) -> None:
        """A refit that it takes part in has begun. What has died or is only coming does not take part."""
        if self.state in _ANSWERING:
            self._to(State.UPDATING, now)

    def updated(self, version: int, now: float) -> None:
        """It has a version that all who took part have: it is published."""
        if self.state in _ANSWERING:
            self.misses = 0
            self.version = version
            self._to(State.HEALTHY, now)

    def passed(self, now: float) -> None:
        """The refit ended without it; the next probe says more."""
        if self.state in (State.UPDATING, State.HEALTHY):
            self._to(State.STALE, now)

    def may_restart(self, now: float) -> bool:
        """Whether it is dead, and its time to be started again has come."""
        if self.state is not State.DEAD:
            return False
        while self._recent and now - self._recent[0] >= self._policy.window_s:
            self._recent.popleft()
        return not self.lost and now - self.since >= self._backoff()

    def _backoff(self) -> float:
        return min(self._policy.backoff_s * 2.0 ** len(self._recent), self._policy.backoff_max_s)

    def postponed(self, reason: str, now: float) -> None:
        """It could not be started, because where it runs is not there. That costs none of its restarts; it is tried
        again after the same wait."""
        if self.state is State.DEAD:
            self.reason, self.since = reason, now

    def restarting(self, now: float) -> None:
        """It was started again."""
        if self.state is not State.DEAD:
            raise ValueError(f"{self.name} is {self.state}: only a dead engine is started again")
        self._recent.append(now)
        self.restarts += 1
        self.misses = 0
        self.version = None
        self._to(State.RESTARTING, now)

    def _to(self, state: State, now: float, reason: str = "") -> None:
        if state is not self.state:
            self.since = now
        self.state = state
        self.reason = reason

    def snapshot(self) -> EngineState:
        """What ``Fleet.states`` shows."""
        return EngineState(
            name=self.name,
            state=self.state,
            version=self.version,
            reason=self.reason,
            since=self.since,
            restarts=self.restarts,
            lost=self.lost,
        )
