"""The trainer's half of the transaction.

The order: begin and stage while the engine still serves (the offer is checked, the bytes are moved beside its weights
and verified there), then pause, load, verify, commit, resume. Whatever can be refused is refused before anything
stops. Every call is watched: when the engine dies, the call that waits for it ends at once.
"""

from __future__ import annotations

import concurrent.futures
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self, TypeVar

from syncstack.errors import (
    DeadlineExceeded,
    EngineUnreachable,
    LinkLost,
    PlanError,
    RefitFailed,
    SyncstackError,
    UsageError,
)
from syncstack.plan import Choice
from syncstack.refit.client import EngineClient, Lease
from syncstack.refit.messages import StepRequest
from syncstack.refit.planning import plan, policy, trainer_hello
from syncstack.refit.report import RefitReport
from syncstack.settings import Settings
from syncstack.threads import in_thread
from syncstack.transports.senders import Sender, make_sender
from syncstack.weights.manifest import Manifest, Wanted, resolve
from syncstack.weights.source import WeightSource
from syncstack.wire.link import Link
from syncstack.wire.messages import Staged

log = logging.getLogger(__name__)

T = TypeVar("T")

WATCH_S = 0.1
"""How often a waiting call looks whether the engine is still there."""

ABORT_S = 5.0
"""How long a failed refit waits for the engine to say in which state it ended."""


class _Target:
    """One engine during the coordinator's life: its client, its links, the plan for them."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.links: list[Link] = []
        self.choice: Choice | None = None
        self.lease: Lease | None = None

    def lost(self) -> bool:
        return any(link.lost() for link in self.links) or (self.lease is not None and self.lease.over())

    def drop_links(self) -> None:
        for link in self.links:
            link.close()
        self.links = []


class Coordinator:
    """Moves versions of one source into a set of engines. One per trainer rank, used from one thread.

    The engines go through each phase together. With one engine, a failed refit leaves it on the old version, on the
    new one, or dirty and out of service; the raised RefitFailed says which.
    """

    def __init__(
        self, *, source: WeightSource, engines: Sequence[EngineClient], settings: Settings, rank: int = 0
    ) -> None:
        if not engines:
            raise UsageError("a coordinator needs at least one engine", next_step="give --engine")
        self._source = source
        self._settings = settings
        self._rank = rank
        self._targets = [_Target(client) for client in engines]
        self._planned = False
        self._sender: Sender | None = None
        self._transport = ""
        self._policy = policy(settings)
        self.hello = trainer_hello(settings, rank)

    def refit(self, version: int) -> list[RefitReport]:
        """Move the source's weights into every engine as ``version``; blocks until they serve it.

        Raises ManifestMismatch or PlanError before anything was changed, and RefitFailed, which names the phase and
        the engine's state, after that. A failed refit may be tried again at once.
        """
        refit = _Refit(version)
        try:
            self._run(refit)
        except BaseException as error:
            state = self._give_up(refit, error)
            if isinstance(error, UsageError | PlanError) or not isinstance(error, SyncstackError):
                raise
            raise RefitFailed(
                f"refit of version {version} failed in {refit.phase}: {error}",
                phase=refit.phase,
                engine_state=state,
                next_step="run the refit again, or look at the engine's log if it is gone",
            ) from error
        return [self._report(refit, target) for target in self._targets]

    def _run(self, refit: _Refit) -> None:
        with refit.timed("begin"):
            self._connect()
            wanted = self._resolve()
            for target in self._targets:
                metas = tuple(want.meta for want in wanted)
                target.lease = target.client.begin(refit.session, refit.version, metas)
        with refit.timed("stage"):
            refit.manifest, refit.staged = self._watched(lambda: self._stage(refit, wanted))
        settings = self._settings
        self._step(refit, "pause", deadline_s=settings.pause_s, mode_matters=True)
        self._step(refit, "load", deadline_s=settings.load_s)
        for name in ("verify", "commit", "resume"):
            self._step(refit, name, deadline_s=settings.control_s)

    def _connect(self) -> None:
        """Make sure that every engine is the one we know and that its links are up; plan anew if one is not."""
        new = [target for target in self._targets if not target.links or target.lost()]
        self._planned = self._planned and not new
        for target in new:
            target.drop_links()
            target.client.renew()  # it may be another process by now
            target.links = target.client.open_links(self._rank)
        if self._planned:
            return
        engines = [(target.client.info, target.client.way) for target in self._targets]
        for target, (choice, *_) in zip(self._targets, plan(self.hello, engines, self._policy), strict=True):
            if choice != target.choice:
                log.info("%s", choice.line(target.client.name))
            target.choice = choice
            self._use(choice.transport)
        self._planned = True

    def _use(self, transport: str) -> None:
        """The sender of the transport that was chosen for all links; another one's is closed."""
        if self._sender is None or self._transport != transport:
            self._close_sender()
            self._sender = make_sender(transport, bucket_bytes=self._settings.bucket_bytes)
            self._transport = transport

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _resolve(self) -> tuple[Wanted, ...]:
        metadata, aliases = self._source.metadata(), self._source.aliases()
        wanted = resolve(metadata, self._targets[0].client.info.tensors, aliases)
        for target in self._targets[1:]:
            if resolve(metadata, target.client.info.tensors, aliases) != wanted:
                raise UsageError(
                    "the engines of one refit expect different tensors",
                    observed=target.client.name,
                    expected=f"those of {self._targets[0].client.name}",
                    next_step="start them from one model folder with one dtype, or refit them apart",
                )
        return wanted

    def _stage(self, refit: _Refit, wanted: Sequence[Wanted]) -> tuple[Manifest, list[Staged]]:
        assert self._sender is not None
        begin = time.perf_counter()
        result = self._sender.stage(
            self._source,
            wanted,
            [link for target in self._targets for link in target.links],
            session=refit.session,
            version=refit.version,
            wait_s=self._settings.link_s,
        )
        refit.transport_s = time.perf_counter() - begin
        return result

    def _step(self, refit: _Refit, name: str, *, deadline_s: float, mode_matters: bool = False) -> None:
        mode = self._settings.pause_mode if mode_matters else "wait"
        request = StepRequest(session=refit.session, mode=mode, deadline_s=deadline_s)
        with refit.timed(name):
            for target in self._targets:
                call = target.client.step
                # The engine keeps the deadline itself; ours only catches an engine that cannot.
                self._watched(lambda c=call: c(name, request, deadline_s=deadline_s + 2.0))  # type: ignore[misc]
                if name == "resume" and target.lease is not None:
                    # It ends by itself now, and its end is no death.
                    target.lease.close()
                    target.lease = None

    def _watched(self, call: Callable[[], T]) -> T:
        """Run ``call`` and return its result, but end early when an engine's process has gone."""
        future = in_thread(call, "syncstack-refit")
        while True:
            done, _ = concurrent.futures.wait([future], timeout=WATCH_S)
            if done:
                return future.result()
            for target in self._targets:
                if target.lost() and not future.done():
                    self._interrupt(future, target)

    def _interrupt(self, future: concurrent.futures.Future[T], target: _Target) -> None:
        """Give the call a moment to fail by itself, which says more; then cut it off."""
        concurrent.futures.wait([future], timeout=10 * WATCH_S)
        if future.done():
            return
        ended = target.lease.ended if target.lease is not None else ""
        for each in self._targets:
            each.drop_links()
            each.client.reset()
        concurrent.futures.wait([future], timeout=10 * WATCH_S)
        kind = EngineUnreachable if ended else LinkLost
        raise kind(f"engine {target.client.name} went away", observed=ended or "a worker's data link ended")

    def _give_up(self, refit: _Refit, error: BaseException) -> str:
        """End every session and free what the refit held; returns the engines' states as far as they can be known."""
        states = []
        for target in self._targets:
            if target.lease is not None:
                states.append(self._abort(target, refit, error))
                target.lease.close()
                target.lease = None
        if refit.staging and self._sender is not None:
            # A worker may still read the segment, or be about to: never write it again.
            self._sender.retire()
            for target in self._targets:
                target.drop_links()
        return ", ".join(states) or "unchanged"

    def _abort(self, target: _Target, refit: _Refit, error: BaseException) -> str:
        request = StepRequest(session=refit.session, reason=f"{type(error).__name__} in {refit.phase}: {error}"[:2000])
        try:
            target.client.reset()
            state = target.client.step("abort", request, deadline_s=ABORT_S).state
        except (EngineUnreachable, DeadlineExceeded):
            return "unreachable"
        except SyncstackError:
            # The session had ended already; the engine knows how.
            try:
                state = target.client.state()
            except SyncstackError:
                return "unreachable"
        return f"{state.step} (version {state.version})"

    def _report(self, refit: _Refit, target: _Target) -> RefitReport:
        assert refit.manifest is not None and target.choice is not None and self._sender is not None
        payload = refit.manifest.payload_bytes
        paused = sum(refit.phases[name] for name in ("pause", "load", "verify", "commit", "resume"))
        return RefitReport(
            version=refit.version,
            engine=target.client.name,
            transport=target.choice.transport,
            why_not=target.choice.why_not,
            bytes=payload,
            tensors=len(refit.manifest.tensors),
            seconds=time.perf_counter() - refit.started,
            transport_seconds=refit.transport_s,
            paused_seconds=paused,
            gb_per_s=payload / refit.transport_s / 1e9,
            phases=dict(refit.phases),
            digests_equal=min(staged.digests_equal for staged in refit.staged),
            cast_bytes=self._sender.cast_bytes,
        )

    def close(self) -> None:
        """Close links and connections and free the segment. The engines keep serving."""
        for target in self._targets:
            target.drop_links()
            target.client.close()
        self._close_sender()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Refit:
    """One version on its way: its clock and what it has produced so far."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.session = secrets.token_hex(16)
        self.started = time.perf_counter()
        self.phase = "begin"
        self.phases: dict[str, float] = {}
        self.transport_s = 0.0
        self.manifest: Manifest | None = None
        self.staged: list[Staged] = []
        self.staging = False

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        self.phase = phase
        self.staging = self.staging or phase == "stage"
        begin = time.perf_counter()
        yield
        self.phases[phase] = time.perf_counter() - begin
