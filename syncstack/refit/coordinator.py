"""The trainer's half of the transaction.

The order: begin and stage while the engine still serves (the offer is checked, the bytes are moved beside its weights
and verified there), then pause, load, verify, commit, resume. Whatever can be refused is refused before anything
stops. Every call is watched: when the engine dies, the call that waits for it ends at once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

from syncstack.collector import full_collection_put_off
from syncstack.errors import (
    DigestMismatch,
    EngineUnreachable,
    GroupLost,
    PlanError,
    RankLost,
    RefitFailed,
    SyncstackError,
    UsageError,
)
from syncstack.facts import Hello
from syncstack.refit.client import EngineClient
from syncstack.refit.kept import KeptVersion
from syncstack.refit.members import Members
from syncstack.refit.messages import StepRequest
from syncstack.refit.metrics import metrics
from syncstack.refit.pace import expected
from syncstack.refit.progress import Progress
from syncstack.refit.ranks import Alone, End, reply_of
from syncstack.refit.report import RefitReport, Unchanged
from syncstack.refit.resync import Resync
from syncstack.refit.staging import Staging
from syncstack.refit.target import Target
from syncstack.refit.watch import watched
from syncstack.settings import Settings
from syncstack.threads import in_thread
from syncstack.transports.order import await_done, mark
from syncstack.weights.manifest import Wanted
from syncstack.weights.source import WeightSource

log = logging.getLogger(__name__)

STEP_SLACK_S = 5.0
"""What a step may take beyond its deadline, until an engine that cannot keep it was cut off."""


class Coordinator:
    """Moves versions of one source into a set of engines. On rank 0 of a trainer, used from one thread.

    The engines go through each phase together. A failed refit leaves an engine on the old version, on the new one, or
    dirty and out of service; the raised RefitFailed says which. With ``settings.min_engines`` the others go on without
    an engine that fails, for as long as so many are left (see ``members.py``).
    """

    def __init__(
        self,
        *,
        source: WeightSource,
        engines: Sequence[EngineClient],
        settings: Settings,
        ranks: Alone | None = None,
    ) -> None:
        """``ranks``: where the trainer has several; each of the others has a Follower. Raises UsageError for fewer
        engines than ``settings.min_engines``, or none, and on another rank than 0."""
        self._ranks = ranks or Alone()
        if self._ranks.rank:
            raise UsageError("a coordinator belongs to rank 0", next_step="make a Follower on the other ranks")
        self._settings = settings
        self._kept = KeptVersion() if settings.keep_version else None
        resync = None if self._kept is None else Resync(self._kept, settings, _alone)
        self._members = Members(engines, settings, resync=resync, told=self._told)
        self._unchanged = Unchanged()
        self._staging = Staging(source, self._members, settings, self._ranks)

    @property
    def _targets(self) -> list[Target]:
        return self._members.live

    @property
    def left_behind(self) -> dict[str, str]:
        """Engines that do not have the last version, by name, and why."""
        return self._members.away

    @property
    def current(self) -> list[str]:
        """Names of the engines that serve the last version now. From any thread."""
        return self._members.current

    def join(self, engine: EngineClient) -> None:
        """Take another engine in while training goes on; the coordinator closes it. From any thread, at once.

        With ``settings.keep_version`` it is brought to the last version right away, by a way that needs no other
        engine; the next refit takes it in, in any case.
        """
        self._members.join(engine)

    def lost(self, name: str, why: str) -> None:
        """The engine of this name has ended, and will answer at the same address again: knock, and bring it to the last
        version as ``join`` does. Whoever starts it again calls this, and not while a refit is on."""
        self._members.lost(name, why)

    def part(self, name: str) -> None:
        """Go on without the engine of this name from the next refit on. From any thread, at once."""
        self._members.part(name)

    def _told(self, number: int) -> None:
        metrics().engines.set(number)

    @property
    def hello(self) -> Hello:
        """What this process says of itself, with its facts."""
        return self._staging.hello

    def refit(self, version: int) -> list[RefitReport]:
        """Move the source's weights into every engine as ``version``; blocks until they serve it. Returns one report
        for each engine that does: all, or with ``settings.min_engines`` those that were not left behind.

        Raises ManifestMismatch or PlanError before anything was changed, and RefitFailed, which names the phase and
        the engine's state, after that. A failed refit may be tried again at once. The other ranks raise or return the
        same.
        """
        try:
            with full_collection_put_off():
                reports = self._refit(version)
        except BaseException as error:
            known = error if isinstance(error, Exception) else SyncstackError(f"rank 0 gave up: {type(error).__name__}")
            with contextlib.suppress(RankLost):
                self._ranks.tell(End(version=version, error=reply_of(known)))
            raise
        self._ranks.tell(End(version=version, reports=tuple(reports)))
        return reports

    def _refit(self, version: int) -> list[RefitReport]:
        self._members.welcome()
        tried = 0
        while True:
            refit = Progress(version)
            tried += 1
            try:
                with self._staging.keeping(self._kept, version):
                    self._run(refit)
                break
            except BaseException as error:
                failure = self._failed(refit, error, tried)
                if failure is error:
                    raise
                if failure is not None:
                    raise failure from error
        since = self._unchanged.since(self._targets[0].manifest, version)
        reports = [self._report(refit, target, since) for target in self._targets]
        for report in reports:
            metrics().count(report)
        self._members.published(version)
        return reports

    def _failed(self, refit: Progress, error: BaseException, tried: int) -> BaseException | None:
        """Give the version up, and return what is to be raised; None to try again where no engine has loaded anything
        yet: without the engines that are gone, or once more where a group broke and all its members are there."""
        metrics().failed.labels(phase=refit.phase).inc()
        # Where one was cut off, all links and leases were: only where none was do they tell who is gone.
        gone = [target for target in self._targets if target.gone]
        gone = gone or [target for target in self._targets if target.lost()]
        state = self._give_up(refit, error)
        if isinstance(error, UsageError | PlanError) or not isinstance(error, SyncstackError):
            return error
        if refit.phase in ("begin", "stage") and self._members.may_leave(gone):
            self._members.leave(dict.fromkeys(gone, error), refit.where)
            return None
        if isinstance(error, GroupLost) and refit.phase == "stage" and not gone and tried == 1:
            # Connections that nobody has used for long are dropped without a word by whatever keeps a table of them.
            log.warning("%s: trying once more with another group: %s", refit.where, error)
            return None
        return RefitFailed(
            f"refit of version {refit.version} failed in {refit.phase}: {error}",
            phase=refit.phase,
            engine_state=state,
            next_step="run the refit again, or look at the engine's log if it is gone",
        )

    def _run(self, refit: Progress) -> None:
        settings = self._settings
        with refit.timed("begin"):
            await_done(mark(), wait_s=settings.link_s)  # here: other threads read what this one has asked for
            wanted = self._staging.agree()
            self._begin(refit, wanted)
        with refit.timed("stage"):
            watched(lambda: self._staging.stage(refit, wanted), self._targets)
            self._staging.look_at_pace(refit)
        self._step(refit, "pause", deadline_s=settings.pause_s, mode_matters=True)
        self._step(refit, "load", deadline_s=settings.load_s)
        for name in ("verify", "commit", "resume"):
            self._step(refit, name, deadline_s=settings.control_s)

    def _begin(self, refit: Progress, wanted: Sequence[Wanted]) -> None:
        metas = tuple(want.meta for want in wanted)
        settings = self._settings
        # An engine that is done with a step stands until the slowest of the others is.
        stand_s = max(settings.pause_s, settings.load_s) + STEP_SLACK_S if len(self._targets) > 1 else 0.0
        for target in self._targets:
            try:
                target.lease = target.client.begin(refit.session, refit.version, metas, stand_s=stand_s)
            except EngineUnreachable as error:
                if not self._members.may_leave([target]):
                    raise
                self._members.leave({target: error}, refit.where)

    def _step(self, refit: Progress, name: str, *, deadline_s: float, mode_matters: bool = False) -> None:
        """One step of all engines at the same time. None is left in it: if one fails, the others end it first."""
        mode = self._settings.pause_mode if mode_matters else "wait"
        request = StepRequest(session=refit.session, mode=mode, deadline_s=deadline_s)

        def one(target: Target) -> None:
            # The engine keeps the deadline itself; ours only catches an engine that cannot.
            reply = watched(lambda: target.client.step(name, request, deadline_s=deadline_s + 2.0), [target])
            target.manifest = str(next(iter(reply.workers), {}).get("manifest", target.manifest))

        with refit.timed(name):
            steps = {target: in_thread(partial(one, target), "syncstack-step") for target in self._targets}
            concurrent.futures.wait(steps.values())
            self._ended(refit, steps)
        if name == "verify" and len(found := {target.manifest for target in self._targets}) > 1:
            raise DigestMismatch(
                "the engines of one refit verified different weights", observed=", ".join(sorted(found))
            )
        if name == "resume":
            for target in self._targets:
                target.end_lease()  # it ends by itself now, and its end is no death

    def _ended(self, refit: Progress, steps: Mapping[Target, concurrent.futures.Future[None]]) -> None:
        """Go on without the engines whose step failed, or raise why the first of them did."""
        failed: dict[Target, SyncstackError] = {}
        for target, step in steps.items():
            try:
                step.result()
            except SyncstackError as why:
                failed[target] = why
        if not failed:
            return
        if not self._members.may_leave([*failed]):
            raise next(iter(failed.values()))
        # Not aborted, which would keep the others standing: without its lease each ends its session by itself.
        self._members.leave(failed, refit.where)
        self._staging.retire()  # they may read what was staged for as long as they live

    def _give_up(self, refit: Progress, error: BaseException) -> str:
        """End every session and free what the refit held; returns the engines' states as far as they can be known."""
        states = []
        for target in self._targets:
            if target.lease is not None:
                why = f"{type(error).__name__} in {refit.phase}: {error}"
                state = "unreachable" if target.gone else target.abort(refit.session, why)
                states.append(state if len(self._targets) == 1 else f"{target.client.name} {state}")
                target.end_lease()
        if refit.staging:
            # A worker may still read the segment, or be about to: never write it again.
            self._staging.retire(links=True)
            for target in self._targets:
                target.drop_links()
        return ", ".join(states) or "unchanged"

    def _report(self, refit: Progress, target: Target, unchanged_since: int | None) -> RefitReport:
        assert refit.stage is not None
        stage = refit.stage
        paused = sum(refit.phases[name] for name in ("pause", "load", "verify", "commit", "resume"))
        return RefitReport(
            version=refit.version,
            engine=target.client.name,
            transport=target.choice.transport,
            why_not=target.choice.why_not,
            bytes=stage.bytes,
            tensors=refit.tensors,
            seconds=time.perf_counter() - refit.started,
            transport_seconds=stage.seconds,
            paused_seconds=paused,
            gb_per_s=stage.bytes / stage.seconds / 1e9,
            expected_gb_per_s=expected(self._staging.rate, stage) / 1e9,
            slow=refit.slow,
            phases=dict(refit.phases),
            digests_equal=refit.digests_equal,
            cast_bytes=stage.cast_bytes,
            unchanged_since=unchanged_since,
            unpinned=stage.unpinned,
            back_after_s=self._members.served(target, refit.version),
        )

    def close(self) -> None:
        """Close links and connections and free the segment. The engines keep serving."""
        self._members.close()
        self._staging.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OneEngine(Coordinator):
    """Brings one engine to a version beside another coordinator, which says how many engines there are."""

    def _told(self, number: int) -> None:
        """See Coordinator."""


def _alone(kept: KeptVersion, engine: EngineClient, settings: Settings, version: int) -> None:
    with _OneEngine(source=kept, engines=[engine], settings=settings) as coordinator:
        coordinator.refit(version)
