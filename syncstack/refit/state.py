"""The state of one engine's weights. Every transition is here, and nowhere else.

::

            begin            pause           load            verify           commit          resume
  SERVING ---------> OPEN ---------> PAUSED ------> LOADING -------> VERIFIED -------> COMMITTED ------> SERVING
     ^ (old version)  |                |               |                 |                 |        (new version)
     |     abort      |      abort     |               +-----------------+                 | abort
     +----------------+----------------+                  abort, failure                   +-----> SERVING (new)
                                                               |
                                                               v          begin
                                                             DIRTY ------------------> OPEN (still refusing requests)

New requests are accepted in SERVING and in OPEN (bytes move beside the engine, its weights are untouched), unless the
engine was dirty before, or is held until its first version is in. ``version`` is the version of the weights that are
in, never of those that are coming.
"""

from __future__ import annotations

import enum
import time

import msgspec

from syncstack.errors import EngineBusy, EngineDirty, ProtocolError


class Step(enum.StrEnum):
    """Where an engine is in the life of a version."""

    STARTING = "starting"
    SERVING = "serving"
    OPEN = "open"
    PAUSED = "paused"
    LOADING = "loading"
    VERIFIED = "verified"
    COMMITTED = "committed"
    DIRTY = "dirty"


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``GET /state`` answers."""

    step: Step
    version: int
    target: int | None
    """The version that is on its way, if one is."""
    accepts_requests: bool
    reason: str
    """Why the engine is dirty; empty otherwise."""
    since: float
    """Unix time of the last transition."""
    manifest: str = ""
    """Digest of the manifest of ``version`` (``weights.manifest.content_digest``); empty before the first commit."""


_NEXT = {
    Step.OPEN: Step.PAUSED,
    Step.PAUSED: Step.LOADING,
    Step.LOADING: Step.VERIFIED,
    Step.VERIFIED: Step.COMMITTED,
}


class EngineState:
    """Used from one thread (the control endpoint's event loop); holds no I/O."""

    def __init__(self) -> None:
        self.step = Step.STARTING
        self.version = 0
        self.target: int | None = None
        self.session: str | None = None
        self.manifest = ""
        self._verified = ""
        self.reason = ""
        self.since = time.time()
        self._moved = time.monotonic()
        self.in_flight = 0
        """Requests that the gate has let in and that have not ended."""
        self.tainted = True
        """The weights may be mixed, or the engine is still starting: nothing may be served."""
        self.held = False
        """The first version has yet to come, and nothing is to be served before."""
        self.reachable = False
        """A trainer can get in: the control endpoint listens."""

    @property
    def accepts_requests(self) -> bool:
        """Whether a new request may enter."""
        return self.step in (Step.SERVING, Step.OPEN) and not self.tainted and not self.held

    def started(self, *, held: bool = False) -> None:
        """The engine has loaded its model folder, version 0, and its control endpoint listens. ``held``: it serves from
        its first commit on."""
        assert self.step is Step.STARTING
        self.held = held
        self.tainted = False
        self.reachable = True
        self._move(Step.SERVING)

    def begin(self, version: int, session: str) -> None:
        """Open a session. Again for the same version: the same session goes on, under its new name."""
        self.check_begin(version)
        self.target, self.session = version, session
        self._move(Step.OPEN)

    def check_begin(self, version: int) -> None:
        """Raise EngineBusy if ``begin`` would."""
        if self.step is Step.STARTING:
            raise EngineBusy("the engine is still starting", next_step="wait until /health answers")
        if self.session is not None and (self.target != version or self.step is not Step.OPEN):
            raise EngineBusy(
                "another refit is open on this engine",
                observed=f"version {self.target}, {self.step}",
                expected="no open session",
                next_step="abort it, or wait until its trainer's lease ends",
            )

    def advance(self, to: Step, session: str) -> None:
        """The next step of an open session; any other order is a ProtocolError."""
        self.check_next(to, session)
        if to is Step.COMMITTED:
            assert self.target is not None
            self.version, self.manifest = self.target, self._verified
            self.tainted = self.held = False
        elif to is Step.LOADING:
            self.tainted = True
        self._move(to)

    def verified(self, manifest: str, session: str) -> None:
        """``advance`` to VERIFIED: the weights that are in are those of ``manifest``."""
        self.advance(Step.VERIFIED, session)
        self._verified = manifest

    def check_next(self, to: Step, session: str) -> None:
        """Raise unless ``advance`` to ``to`` would be allowed."""
        self.check_session(session)
        if _NEXT.get(self.step) is not to:
            raise ProtocolError(f"{to} cannot follow {self.step}", next_step="keep the order of the transaction")

    def check_session(self, session: str) -> None:
        """Raise unless ``session`` is the open one."""
        if session != self.session:
            if self.step is Step.DIRTY:
                raise EngineDirty(f"the engine is dirty: {self.reason}", next_step="begin a full refit")
            raise ProtocolError("no such session", next_step="begin one")

    def resume(self, session: str) -> None:
        """A committed session ends and the engine serves its version."""
        self.check_session(session)
        if self.step is not Step.COMMITTED:
            raise ProtocolError(f"resume cannot follow {self.step}", next_step="commit first, or abort")
        self._end(Step.SERVING)

    def taint(self, reason: str) -> None:
        """Whatever the step: the engine must not serve, and the end of its session is dirty."""
        self.tainted, self.reason = True, self.reason or reason

    def abort(self, reason: str) -> None:
        """End the session, whatever its step: on the old version, on the new one, or dirty. Without one: nothing."""
        if self.session is None:
            return
        if self.tainted:
            self.reason = self.reason or f"version {self.target} was not completed: {reason}"
            self._end(Step.DIRTY)
        else:
            self._end(Step.SERVING)

    def _end(self, step: Step) -> None:
        self.target = self.session = None
        if step is Step.SERVING:
            self.reason = ""
        self._move(step)

    def _move(self, step: Step) -> None:
        self.step = step
        self.since = time.time()
        self._moved = time.monotonic()

    @property
    def stood_s(self) -> float:
        """Seconds since the last transition, whatever was done to the clock."""
        return time.monotonic() - self._moved

    def report(self) -> StateReport:
        """A snapshot."""
        return StateReport(
            step=self.step,
            version=self.version,
            target=self.target,
            accepts_requests=self.accepts_requests,
            reason=self.reason,
            since=self.since,
            manifest=self.manifest,
        )
