"""The trainer's half of the transaction.

The order: begin and stage while the engine still serves (the offer is checked, the bytes are moved beside its weights
and verified there), then pause, load, verify, commit, resume. Whatever can be refused is refused before anything
stops. Every call is watched: when the engine dies, the call that waits for it ends at once.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Self

from syncstack.errors import (
    DeadlineExceeded,
    EngineUnreachable,
    PathTooSlow,
    PlanError,
    RefitFailed,
    SyncstackError,
    UsageError,
)
from syncstack.facts import Hello
from syncstack.facts.cgroup import throttled_s
from syncstack.refit.agreement import Agreement
from syncstack.refit.client import EngineClient
from syncstack.refit.messages import StepRequest
from syncstack.refit.metrics import metrics
from syncstack.refit.pace import ClockedSource, Stage, expected, why_slow
from syncstack.refit.progress import Progress
from syncstack.refit.report import RefitReport
from syncstack.refit.target import Target
from syncstack.refit.watch import watched
from syncstack.settings import Settings
from syncstack.threads import in_thread
from syncstack.transports.order import await_done, mark
from syncstack.transports.senders import Sender, make_sender
from syncstack.weights.manifest import Wanted, resolve
from syncstack.weights.source import WeightSource, example_of

log = logging.getLogger(__name__)

ABORT_S = 5.0
"""How long a failed refit waits for the engine to say in which state it ended."""


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
        self._targets = [Target(client) for client in engines]
        self._agreement = Agreement(settings, rank)
        self._transport = ""
        self._sender: Sender | None = None
        self._warm = False  # whether sender and workers have the segment of the last version
        self._told_slow = False

    @property
    def hello(self) -> Hello:
        """What this process says of itself, with its facts."""
        return self._agreement.hello

    def refit(self, version: int) -> list[RefitReport]:
        """Move the source's weights into every engine as ``version``; blocks until they serve it.

        Raises ManifestMismatch or PlanError before anything was changed, and RefitFailed, which names the phase and
        the engine's state, after that. A failed refit may be tried again at once.
        """
        refit = Progress(version)
        try:
            self._run(refit)
        except BaseException as error:
            metrics().failed.labels(phase=refit.phase).inc()
            state = self._give_up(refit, error)
            if isinstance(error, UsageError | PlanError) or not isinstance(error, SyncstackError):
                raise
            raise RefitFailed(
                f"refit of version {version} failed in {refit.phase}: {error}",
                phase=refit.phase,
                engine_state=state,
                next_step="run the refit again, or look at the engine's log if it is gone",
            ) from error
        reports = [self._report(refit, target) for target in self._targets]
        for report in reports:
            metrics().count(report)
        return reports

    def _run(self, refit: Progress) -> None:
        with refit.timed("begin"):
            await_done(mark(), wait_s=self._settings.link_s)  # here: other threads read what this one has asked for
            wanted = self._agreed()
            for target in self._targets:
                metas = tuple(want.meta for want in wanted)
                target.lease = target.client.begin(refit.session, refit.version, metas)
        with refit.timed("stage"):
            watched(lambda: self._stage(refit, wanted), self._targets)
            self._look_at_pace(refit)
        settings = self._settings
        self._step(refit, "pause", deadline_s=settings.pause_s, mode_matters=True)
        self._step(refit, "load", deadline_s=settings.load_s)
        for name in ("verify", "commit", "resume"):
            self._step(refit, name, deadline_s=settings.control_s)

    def _agreed(self) -> tuple[Wanted, ...]:
        """Make sure that every engine is the one we know, and all links have a transport; plan anew if one is not."""
        new = [target for target in self._targets if not target.links or target.lost()]
        for target in new:
            target.drop_links()
            target.client.renew()  # it may be another process by now
        wanted = self._resolve()
        if new or not self._transport:
            self._transport = ""
            self._retire()
            transport = self._agreement.reach(self._targets, wanted, example_of(self._source))
            self._take(transport)
        return wanted

    def _take(self, transport: str) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = make_sender(
            transport, bucket_bytes=self._settings.bucket_bytes, device=self._agreement.hello.device
        )
        self._transport = transport
        self._told_slow = False

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

    def _stage(self, refit: Progress, wanted: Sequence[Wanted]) -> None:
        assert self._sender is not None
        links = {
            link: way.fd for target in self._targets for link, way in zip(target.links, target.choices, strict=True)
        }
        source = ClockedSource(self._source)
        waited, begin = throttled_s(), time.perf_counter()
        refit.manifest, refit.staged = self._sender.stage(
            source,
            wanted,
            list(links),
            session=refit.session,
            version=refit.version,
            wait_s=self._settings.link_s,
            fd_ways={link: way for link, way in links.items() if way},
        )
        refit.stage = Stage(
            bytes=refit.manifest.payload_bytes,
            seconds=time.perf_counter() - begin,
            first=not self._warm,
            source_s=source.seconds,
            worker_s=max(staged.digest_s for staged in refit.staged),
            cast_bytes=self._sender.cast_bytes,
            throttled_s=throttled_s() - waited,
            unpinned=self._sender.unpinned,
        )
        self._warm = True

    def _look_at_pace(self, refit: Progress) -> None:
        """Say once for each plan that its path is slow; strict: end the refit while the engines still serve."""
        assert refit.stage is not None and self._agreement.rate is not None
        refit.slow = why_slow(self._agreement.rate, refit.stage)
        if not refit.slow:
            return
        if self._settings.strict:
            raise PathTooSlow(
                f"{self._transport} is slow: {refit.slow}",
                consequence="Strict mode forbids that, and the engines keep their old weights",
                next_step="remove the cause, or set SYNCSTACK_STRICT=false",
            )
        if not self._told_slow:
            self._told_slow = True
            log.warning("%s is slow: %s", self._transport, refit.slow)

    def _step(self, refit: Progress, name: str, *, deadline_s: float, mode_matters: bool = False) -> None:
        """One step of all engines at the same time. None is left in it: if one fails, the others end it first."""
        mode = self._settings.pause_mode if mode_matters else "wait"
        request = StepRequest(session=refit.session, mode=mode, deadline_s=deadline_s)

        def one(target: Target) -> None:
            # The engine keeps the deadline itself; ours only catches an engine that cannot.
            watched(lambda: target.client.step(name, request, deadline_s=deadline_s + 2.0), [target])

        with refit.timed(name):
            steps = [in_thread(partial(one, target), "syncstack-step") for target in self._targets]
            concurrent.futures.wait(steps)
            for step in steps:
                step.result()
        if name == "resume":
            for target in self._targets:
                target.end_lease()  # it ends by itself now, and its end is no death

    def _give_up(self, refit: Progress, error: BaseException) -> str:
        """End every session and free what the refit held; returns the engines' states as far as they can be known."""
        states = []
        for target in self._targets:
            if target.lease is not None:
                state = self._abort(target, refit, error)
                states.append(state if len(self._targets) == 1 else f"{target.client.name} {state}")
                target.end_lease()
        if refit.staging:
            # A worker may still read the segment, or be about to: never write it again.
            self._retire()
            for target in self._targets:
                target.drop_links()
        return ", ".join(states) or "unchanged"

    def _retire(self) -> None:
        self._warm = False
        if self._sender is not None:
            self._sender.retire()

    def _abort(self, target: Target, refit: Progress, error: BaseException) -> str:
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

    def _report(self, refit: Progress, target: Target) -> RefitReport:
        assert refit.manifest is not None and refit.stage is not None and self._agreement.rate is not None
        stage = refit.stage
        paused = sum(refit.phases[name] for name in ("pause", "load", "verify", "commit", "resume"))
        return RefitReport(
            version=refit.version,
            engine=target.client.name,
            transport=target.choice.transport,
            why_not=target.choice.why_not,
            bytes=stage.bytes,
            tensors=len(refit.manifest.tensors),
            seconds=time.perf_counter() - refit.started,
            transport_seconds=stage.seconds,
            paused_seconds=paused,
            gb_per_s=stage.bytes / stage.seconds / 1e9,
            expected_gb_per_s=expected(self._agreement.rate, stage) / 1e9,
            slow=refit.slow,
            phases=dict(refit.phases),
            digests_equal=min(staged.digests_equal for staged in refit.staged),
            cast_bytes=stage.cast_bytes,
            unpinned=stage.unpinned,
        )

    def close(self) -> None:
        """Close links and connections and free the segment. The engines keep serving."""
        for target in self._targets:
            target.drop_links()
            target.client.close()
        if self._sender is not None:
            self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
