"""The engine's half of the transaction: the control endpoint over one engine.

The trainer's life is known by its lease: ``begin`` answers with a stream that stays open as long as the session, and
when the trainer dies the kernel closes it. No step is guessed after that: the session ends as its state says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from syncstack.errors import DeadlineExceeded, EngineBusy, LoadFailed, SyncstackError
from syncstack.refit.messages import BeginRequest, EngineInfo, ErrorReply, StepReply, StepRequest, WorkerInfo
from syncstack.refit.state import EngineState, StateReport, Step
from syncstack.settings import PauseMode
from syncstack.weights.manifest import compare, fingerprint
from syncstack.weights.meta import ParamMeta
from syncstack.wire.messages import PROTOCOL_VERSION

log = logging.getLogger(__name__)


RESUME_S = 10.0
"""How long an engine may take to resume, or a worker to drop a session."""

DRAIN_POLL_S = 0.01

END_S = 0.2
"""For the answer to go out, before the server that sends it is told to end."""


class EngineHost(Protocol):
    """What an engine's adapter offers to the control endpoint. All calls are made one at a time."""

    kind: str
    kind_version: str
    model: str
    dtype: str
    tensors: tuple[ParamMeta, ...]

    async def call_workers(self, op: str, session: str, expect: str, deadline_s: float) -> list[dict[str, Any]]:
        """Run ``op`` in every worker (see ``engines/worker.py``) and return what each answered, by rank.

        Raises TimeoutError at the deadline; a call that was given up must not be taken for the answer to the next.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; running requests end, are aborted, or freeze. Paused already: nothing."""
        ...

    async def publish(self, version: int) -> None:
        """Drop every cache that old weights made, and set the engine's own version. Must raise if it could not."""
        ...

    async def resume(self) -> None:
        """Generate again. Not paused: nothing."""
        ...


class Control:
    """One engine's sessions. All methods run on one event loop; steps are serialised by one lock."""

    def __init__(
        self,
        *,
        name: str,
        host: EngineHost,
        state: EngineState,
        workers: tuple[WorkerInfo, ...],
        heartbeat_s: float,
        stall_s: float,
    ) -> None:
        self._name = name
        self._host = host
        self.state = state
        self._workers = workers
        self._heartbeat_s = heartbeat_s
        self._stall_s = stall_s
        self._stand_s = stall_s
        self._lock = asyncio.Lock()
        self._ended: dict[str, str] = {}
        self._change = asyncio.Event()
        self._expect = ""

    def hello(self) -> EngineInfo:
        """Who this engine is and what it expects."""
        host = self._host
        return EngineInfo(
            protocol=PROTOCOL_VERSION,
            name=self._name,
            kind=host.kind,
            kind_version=host.kind_version,
            model=host.model,
            dtype=host.dtype,
            tensors=host.tensors,
            workers=self._workers,
            heartbeat_s=self._heartbeat_s,
            state=self.state.report(),
        )

    async def begin(self, request: BeginRequest) -> None:
        """Check the offer and open a session. Raises ManifestMismatch or EngineBusy and changes nothing then."""
        compare(request.tensors, self._host.tensors)
        self.state.check_begin(request.version)  # now, and not when a load of minutes has let go of the lock
        async with self._lock:
            replaced = self.state.session
            self.state.begin(request.version, request.session)
            self._stand_s = max(self._stall_s, request.stand_s)
            self._expect = fingerprint(request.version, request.tensors)
            if replaced is not None and replaced != request.session:
                await self._finish(replaced)
        log.info("version %d: session %s is open", request.version, request.session)

    async def lease(self, session: str) -> AsyncGenerator[str, None]:
        """Yields "" at every heartbeat and at last how the session ended. Closed early: the trainer has gone."""
        try:
            while self.state.session == session:
                yield ""
                if self._stalled():
                    what = f"its trainer did nothing for {self._stand_s:g} s while the engine stood"
                    await self._abandon(session, what)
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._change.wait(), self._heartbeat_s)
            yield self._ended.pop(session, "another session took its place")
        finally:
            if self.state.session == session:
                # The trainer went away. Finish in a task of our own: this one is being cancelled.
                task = asyncio.get_running_loop().create_task(self._abandon(session, "its trainer went away"))
                _TASKS.add(task)
                task.add_done_callback(_TASKS.discard)

    def _stalled(self) -> bool:
        """Whether the engine stands between two steps, and has for too long: its trainer lives but does nothing."""
        standing = self.state.step in (Step.PAUSED, Step.LOADING, Step.VERIFIED, Step.COMMITTED)
        return standing and not self._lock.locked() and self.state.stood_s > self._stand_s

    async def _abandon(self, session: str, reason: str) -> None:
        async with self._lock:
            if self.state.session == session:
                await self._abort(reason)

    async def step(self, name: str, request: StepRequest) -> StepReply:
        """Run one step of the transaction under the lock."""
        async with self._lock:
            workers = await getattr(self, f"_step_{name}")(request)
        return StepReply(state=self.state.report(), workers=tuple(workers or ()))

    async def end(self) -> StateReport:
        """End the engine's server as SIGTERM would, once this has been answered. Raises EngineBusy while a session is
        open."""
        async with self._lock:
            if self.state.session is not None:
                raise EngineBusy("a refit is open on this engine", next_step="ask again when it is over")
            log.info("its trainer has done its work: the engine ends")
            asyncio.get_running_loop().call_later(END_S, os.kill, os.getpid(), signal.SIGTERM)
            return self.state.report()

    async def _step_pause(self, request: StepRequest) -> None:
        self.state.advance(Step.PAUSED, request.session)  # the gate closes before the engine drains
        try:
            async with asyncio.timeout(request.deadline_s):
                # A request may be in the gate and not yet in the engine: it would run on the next weights.
                if request.mode == "wait":
                    await self._drain()
                await self._host.pause(request.mode)
                if request.mode == "abort":
                    await self._drain()
        except TimeoutError:
            await self._abort("pause did not end")
            raise DeadlineExceeded(
                f"running requests did not end within {request.deadline_s:g} s",
                consequence=f"The engine goes on serving version {self.state.version}",
                next_step="raise SYNCSTACK_PAUSE_S, or set SYNCSTACK_PAUSE_MODE=abort",
            ) from None
        except Exception as error:
            await self._abort(f"pause failed: {error}")
            raise

    async def _drain(self) -> None:
        while self.state.in_flight:
            await asyncio.sleep(DRAIN_POLL_S)

    async def _step_load(self, request: StepRequest) -> list[dict[str, Any]]:
        self.state.advance(Step.LOADING, request.session)
        return await self._on_workers("load", request)

    async def _step_verify(self, request: StepRequest) -> list[dict[str, Any]]:
        self.state.check_next(Step.VERIFIED, request.session)
        replies = await self._on_workers("verify", request)
        found = {str(reply.get("manifest", "")) for reply in replies}
        if len(found) > 1:
            await self._abort("its workers verified different weights")
            raise LoadFailed("the workers of one engine verified different weights", observed=", ".join(sorted(found)))
        self.state.verified(next(iter(found), ""), request.session)
        return replies

    async def _on_workers(self, op: str, request: StepRequest) -> list[dict[str, Any]]:
        """Run ``op`` everywhere; any failure from here on makes the engine dirty."""
        try:
            replies = await self._host.call_workers(op, request.session, self._expect, request.deadline_s)
            for reply in replies:
                if "error" in reply:
                    raise ErrorReply(**reply["error"]).to_error()
            if len(replies) != len(self._workers):
                raise LoadFailed(f"{len(replies)} of {len(self._workers)} workers answered {op}")
        except SyncstackError as error:
            await self._abort(f"{op} failed: {error}")
            raise
        except TimeoutError:
            what = f"{op} did not end within {request.deadline_s:g} s"
            await self._abort(what)
            raise DeadlineExceeded(what, next_step="raise SYNCSTACK_LOAD_S if the engine's loader needs more") from None
        except Exception as error:
            # Whatever an engine raises, its weights are unknown now.
            await self._abort(f"{op} failed: {error}")
            raise LoadFailed(f"the engine failed in {op}", observed=f"{type(error).__name__}: {error}") from error
        return replies

    async def _step_commit(self, request: StepRequest) -> None:
        self.state.check_next(Step.COMMITTED, request.session)
        assert self.state.target is not None
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._host.publish(self.state.target)
        except Exception as error:
            await self._abort(f"caches could not be flushed: {error}")
            if isinstance(error, SyncstackError):
                raise
            raise LoadFailed("the engine could not publish its version", observed=repr(error)) from error
        self.state.advance(Step.COMMITTED, request.session)
        log.info("version %d is in", self.state.version)

    async def _step_resume(self, request: StepRequest) -> None:
        self.state.check_session(request.session)
        if self.state.step is Step.COMMITTED:
            async with asyncio.timeout(request.deadline_s):
                await self._host.resume()
        self.state.resume(request.session)
        self._end(request.session, f"version {self.state.version} serves")

    async def _step_abort(self, request: StepRequest) -> None:
        if self.state.session is None:
            return  # it ended already, as the state in the reply says
        self.state.check_session(request.session)
        await self._abort(request.reason or "the trainer aborted it")

    async def _abort(self, reason: str) -> None:
        session = self.state.session
        if session is None:
            return
        await self._finish(session)
        if self.state.step in (Step.PAUSED, Step.COMMITTED) and not self.state.tainted:
            # Its weights are whole, old or new: let it serve. If it will not go on, it must not say that it serves.
            try:
                async with asyncio.timeout(RESUME_S):
                    await self._host.resume()
            except Exception as error:
                log.exception("the engine did not resume")
                self.state.taint(f"it did not resume: {error!r}")
        self.state.abort(reason)
        self._end(session, f"aborted: {reason}; the engine is {self.state.step}")
        log.warning("session %s ended: %s; the engine is %s", session, reason, self.state.step)

    def _end(self, session: str, how: str) -> None:
        """Tell the session's lease, at once, how it ended."""
        self._ended = {session: how}
        self._change.set()
        self._change = asyncio.Event()

    async def _finish(self, session: str) -> None:
        """Let every worker drop the session. It holds memory only, so a failure changes nothing but a log line."""
        try:
            await self._host.call_workers("finish", session, "", RESUME_S)
        except Exception:
            log.exception("a worker could not drop session %s", session)


_TASKS: set[asyncio.Task[None]] = set()
"""Keeps running clean-ups alive: the event loop holds tasks weakly."""
