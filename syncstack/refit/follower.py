"""A trainer rank that does not lead: during a refit it carries out what rank 0 says, over links of its own."""

from __future__ import annotations

import time
from typing import Self

from syncstack.errors import LinkRefused, RefitFailed, SyncstackError, UsageError
from syncstack.refit import ranks as say
from syncstack.refit.agreement import cause_of, trials_of
from syncstack.refit.client import EngineClient
from syncstack.refit.pace import ClockedSource
from syncstack.refit.planning import placed, trainer_hello
from syncstack.refit.ranks import Done, Ranks, reply_of
from syncstack.refit.report import RefitReport
from syncstack.refit.staging import stage_share
from syncstack.refit.target import Target
from syncstack.refit.trial import TRIAL_S, Trials
from syncstack.settings import Settings
from syncstack.transports.order import await_done, mark
from syncstack.transports.senders import Sender, make_sender
from syncstack.weights.source import WeightSource, example_of


class Follower:
    """On every trainer rank but 0, which has the Coordinator. Used from one thread."""

    def __init__(self, *, source: WeightSource, settings: Settings, ranks: Ranks) -> None:
        """``source``: this rank's end of the same weights. Raises UsageError on rank 0."""
        if not ranks.rank:
            raise UsageError("rank 0 leads", next_step="make a Coordinator there")
        self._source = source
        self._settings = settings
        self._ranks = ranks
        self._hello = trainer_hello(settings, ranks.rank)
        self._targets: dict[tuple[str, ...], Target] = {}
        """By the nonces of an engine's workers."""
        self._live: list[Target] = []
        self._sender: Sender | None = None
        self._transport = ""

    def refit(self, version: int) -> list[RefitReport]:
        """Take part in rank 0's refit of ``version``; blocks until that has ended. Returns its reports.

        Raises RefitFailed with what rank 0 raised, and RankLost.
        """
        s = self._settings
        # What rank 0 may do by itself: wait for an engine, and for the steps in which nobody else has a part.
        wait_s = 2 * (s.engine_ready_s + s.pause_s + s.load_s) + 8 * s.control_s
        while True:
            order = self._ranks.hear(wait_s=wait_s)
            if isinstance(order, say.End):
                return self._ended(order, version)
            if isinstance(order, say.Retire):
                self._retire(links=order.links)
                continue
            try:
                done = self._do(order, version)
            except Exception as error:  # noqa: BLE001 - rank 0 waits to hear it, and ends the refit on all ranks
                done = Done(error=reply_of(error))
                self._retire(links=True)  # what one still has in it belongs to nobody
            self._ranks.answer(done, wait_s=s.link_s)

    def _ended(self, end: say.End, version: int) -> list[RefitReport]:
        if end.error is not None:
            why = end.error.to_error()
            raise RefitFailed(f"on rank 0: {why}", phase="unknown", next_step="run the refit again on all ranks")
        if end.version != version:
            raise _out_of_step(end.version, version)
        return list(end.reports)

    def _do(self, order: say.Order, version: int) -> Done:
        if isinstance(order, say.Introduce):
            await_done(mark(), wait_s=self._settings.link_s)
            self._hello = placed(self._hello, example_of(self._source))
            return Done(hello=self._hello)
        if isinstance(order, say.Connect):
            return self._connect(order)
        if isinstance(order, say.Measure):
            rate = self._trials().measure(order.wanted, self._settings.link_s)
            return Done(first=rate.first, again=rate.again)
        assert isinstance(order, say.Send)
        return self._send(order, version)

    def _connect(self, order: say.Connect) -> Done:
        """Links to just these engines, by a sender of this transport; and a trial of each."""
        self._retire(links=False)
        wanted = {engine.workers: engine for engine in order.engines}
        for key in [*self._targets]:
            if key not in wanted:
                self._drop(key)
        for key, engine in wanted.items():
            if key not in self._targets:
                self._targets[key] = self._dial(engine)
            target = self._targets[key]
            if target.lost():
                target.drop_links()
            target.connect(engine.choices[self._ranks.rank], self._ranks.rank)
        self._live = [self._targets[key] for key in wanted]
        if self._transport != order.transport or self._sender is None:
            if self._sender is not None:
                self._sender.close()
            bucket_bytes = self._settings.bucket_bytes
            self._sender = make_sender(order.transport, bucket_bytes=bucket_bytes, device=self._hello.device)
            self._transport = order.transport
        refused = cause_of(self._trials().run(min(TRIAL_S, self._settings.link_s)))
        if refused:
            self._retire(links=True)
        return Done(refused=refused)

    def _dial(self, engine: say.Engine) -> Target:
        """The same processes that rank 0 talks to. A name may stand for several engines: then it is asked again."""
        deadline = time.monotonic() + self._settings.link_s
        client = EngineClient.connect(engine.address, settings=self._settings)
        while tuple(worker.hello.nonce for worker in client.info.workers) != engine.workers:
            if time.monotonic() > deadline:
                client.close()
                raise LinkRefused(
                    f"rank {self._ranks.rank} reaches another engine at {engine.address} than rank 0",
                    next_step="give each engine an address of its own",
                )
            time.sleep(0.1)
            client.renew()
        return Target(client)

    def _trials(self) -> Trials:
        return trials_of(self._transport, self._live, self._hello, example_of(self._source), self._settings)

    def _send(self, order: say.Send, version: int) -> Done:
        """Whatever is wrong here, the source is gone through: the other ranks wait for it."""
        assert self._sender is not None
        with ClockedSource(self._source, whole=True) as source:
            if order.version != version:
                raise _out_of_step(order.version, version)
            await_done(mark(), wait_s=self._settings.link_s)
            manifest, staged = stage_share(
                self._sender, source, order, self._live, self._ranks, wait_s=self._settings.link_s
            )
        return Done(staged=tuple(staged), bytes=manifest.payload_bytes, cast_bytes=self._sender.cast_bytes)

    def _retire(self, *, links: bool) -> None:
        if self._sender is not None:
            self._sender.retire()
        if links:
            for target in self._targets.values():
                target.drop_links()

    def _drop(self, key: tuple[str, ...]) -> None:
        target = self._targets.pop(key)
        target.drop_links()
        target.client.close()

    def close(self) -> None:
        """Close links and connections and free the segment. The engines keep serving."""
        for key in [*self._targets]:
            self._drop(key)
        if self._sender is not None:
            self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _out_of_step(leader: int, own: int) -> SyncstackError:
    return UsageError(
        "the trainer's ranks refit different versions",
        observed=f"rank 0: {leader}; here: {own}",
        next_step="call refit with one version on all ranks",
    )
