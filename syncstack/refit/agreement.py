"""How all links of a refit come to one transport: the plan from the hellos, then a trial of every link.

Every trial ends before anything follows from one: nobody waits for a link that will never move, and one refusal takes
all links to the next transport together. Which transport was refused, on which link and why is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import torch

from syncstack.errors import PlanError
from syncstack.facts import Hello
from syncstack.plan import Choice, FdWay, Refused
from syncstack.refit.metrics import metrics
from syncstack.refit.planning import placed, plan_ranks, policy, trainer_hello
from syncstack.refit.ranks import Alone, Connect, Engine, Introduce, Measure, first_error
from syncstack.refit.target import Target
from syncstack.refit.trial import REFUSALS, TRIAL_S, Ended, Rate, Trials, short
from syncstack.settings import Settings
from syncstack.weights.manifest import Wanted
from syncstack.wire.link import Link

log = logging.getLogger(__name__)


class Agreement:
    """The transport of all links, tried. Used from the coordinator's thread."""

    def __init__(self, settings: Settings, ranks: Alone | None = None) -> None:
        """Collect this process's facts. Raises SettingsError for an unknown transport."""
        self._ranks = ranks or Alone()
        self.hello = trainer_hello(settings, self._ranks.rank)
        self._policy = policy(settings)
        self._settings = settings
        self._rates: dict[tuple[str, ...], Rate] = {}
        self._told: tuple[object, ...] = ()
        self._warned: set[tuple[Refused, str]] = set()
        self.rate: Rate | None = None
        """What the agreed transport did on these links, measured once for each set of workers."""

    def reach(self, targets: Sequence[Target], wanted: Sequence[Wanted], example: torch.Tensor | None = None) -> str:
        """Plan, connect and try every link of ``targets``; returns the transport they all passed. Blocks.

        ``wanted`` is what the refits will move, ``example`` one of the tensors, None for weights on the host. Raises
        PlanError when no transport passes, LinkLost when a worker goes away, LinkRefused when another process answers
        in its place. The other ranks of this trainer do the same at the same time, each on its own links.
        """
        self.hello = placed(self.hello, example)
        with self._ranks.together(Introduce(), wait_s=self._settings.link_s) as others:
            pass
        hellos = [self.hello, *(other.hello for other in others if other.hello is not None)]
        refused: tuple[Refused, ...] = ()
        while True:
            orders = self._plan(hellos, targets, refused)
            transport = orders[0].choices[0][0].transport
            trial_s = min(TRIAL_S, self._settings.link_s)
            order = Connect(transport=transport, engines=orders)
            with self._ranks.together(order, wait_s=self._settings.engine_ready_s + 2 * TRIAL_S) as others:
                for target, choices in zip(targets, orders, strict=True):
                    target.connect(choices.choices[self._ranks.rank], self._ranks.rank)
                trials = trials_of(transport, targets, self.hello, example, self._settings)
                cause = cause_of(trials.run(trial_s))
            cause = cause or first_error(others) or self._measure(trials, targets, wanted)
            if not cause:
                self._tell(targets, refused)
                return transport
            refused = (*refused, Refused(transport=transport, cause=cause))
            for target in targets:
                target.drop_links()  # what a link that failed still has in it belongs to nobody

    def _plan(
        self, hellos: Sequence[Hello], targets: Sequence[Target], refused: tuple[Refused, ...]
    ) -> tuple[Engine, ...]:
        """What every rank is told of each engine. Raises PlanError."""
        wanted = msgspec.structs.replace(self._policy, excluded=refused)
        engines = [(target.client.info, target.client.way) for target in targets]
        try:
            plans = plan_ranks(hellos, engines, wanted)
        except PlanError:
            self._warn(refused, "nothing")
            raise
        return tuple(
            Engine(
                address=target.client.address,
                workers=tuple(worker.hello.nonce for worker in target.client.info.workers),
                choices=tuple(tuple(plans[rank][index]) for rank in range(len(hellos))),
            )
            for index, target in enumerate(targets)
        )

    def _tell(self, targets: Sequence[Target], refused: tuple[Refused, ...]) -> None:
        """Say what was agreed on, and again only when it is something else."""
        self._warn(refused, targets[0].choice.transport)
        told = tuple((target.client.name, _said(target.choice)) for target in targets)
        for name, line in told:
            if (name, line) not in self._told:
                log.info("%s: %s", name, line)
        self._told = told

    def _warn(self, refused: tuple[Refused, ...], taken: str) -> None:
        for each in refused:
            if (each, taken) in self._warned:
                continue
            self._warned.add((each, taken))
            metrics().fallbacks.labels(transport=each.transport).inc()
            log.warning("a trial refused %s on %s; all links take %s", each.transport, each.cause, taken)

    def _measure(self, trials: Trials, targets: Sequence[Target], wanted: Sequence[Wanted]) -> str:
        """Set the rate of these workers by this transport: measured once, and known for as long as they live.

        Returns the cause where the larger amount is refused.
        """
        workers = [worker.hello.nonce for target in targets for worker in target.client.info.workers]
        ways = [f"{choice.transport}/{choice.fd}" for target in targets for choice in target.choices]
        key = (*workers, *ways)
        if key not in self._rates:
            try:
                order = Measure(wanted=tuple(wanted))
                with self._ranks.together(order, wait_s=3 * self._settings.link_s) as others:
                    own = trials.measure(wanted, self._settings.link_s)
                rate = Rate(
                    first=own.first + sum(other.first for other in others),
                    again=own.again + sum(other.again for other in others),
                )
                self._rates = {key: rate}
            except REFUSALS as error:
                return f"all links together: {short(error)}"
        self.rate = self._rates[key]
        return ""


def _said(choice: Choice) -> str:
    return choice.line("").removeprefix(": ")


def trials_of(
    transport: str, targets: Sequence[Target], hello: Hello, example: torch.Tensor | None, settings: Settings
) -> Trials:
    """Trials of one rank's links to ``targets``. ``hello`` is that rank's, ``example`` one of its tensors."""
    return Trials(
        transport,
        _links(targets),
        bucket_bytes=settings.bucket_bytes,
        gpu=hello.device,
        device=torch.device("cpu") if example is None else example.device,
    )


def _links(targets: Sequence[Target]) -> dict[str, tuple[Link, FdWay]]:
    return {
        f"{target.client.name} worker {worker.rank}": (link, choice.fd)
        for target in targets
        for worker, link, choice in zip(target.client.info.workers, target.links, target.choices, strict=True)
    }


def cause_of(ended: Sequence[Ended]) -> str:
    """The first link that failed and how many others did; "" if none did."""
    failed = [each for each in ended if each.cause]
    if not failed:
        return ""
    more = f" (and {len(failed) - 1} more links)" if len(failed) > 1 else ""
    return f"{failed[0].link}{more}: {failed[0].cause}"
