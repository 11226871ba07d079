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
from syncstack.plan import Choice, FdWay, Refused
from syncstack.refit.metrics import metrics
from syncstack.refit.planning import placed, plan, policy, trainer_hello
from syncstack.refit.target import Target
from syncstack.refit.trial import REFUSALS, TRIAL_S, Ended, Rate, Trials, short
from syncstack.settings import Settings
from syncstack.weights.manifest import Wanted
from syncstack.wire.link import Link

log = logging.getLogger(__name__)


class Agreement:
    """The transport of all links, tried. Used from the coordinator's thread."""

    def __init__(self, settings: Settings, rank: int) -> None:
        """Collect this process's facts. Raises SettingsError for an unknown transport."""
        self.hello = trainer_hello(settings, rank)
        self._policy = policy(settings)
        self._settings = settings
        self._rank = rank
        self._rates: dict[tuple[str, ...], Rate] = {}
        self._told: tuple[object, ...] = ()
        self._warned: set[tuple[Refused, str]] = set()
        self.rate: Rate | None = None
        """What the agreed transport did on these links, measured once for each set of workers."""

    def reach(self, targets: Sequence[Target], wanted: Sequence[Wanted], example: torch.Tensor | None = None) -> str:
        """Plan, connect and try every link of ``targets``; returns the transport they all passed. Blocks.

        ``wanted`` is what the refits will move, ``example`` one of the tensors, None for weights on the host. Raises
        PlanError when no transport passes, LinkLost when a worker goes away, LinkRefused when another process answers
        in its place.
        """
        self.hello = placed(self.hello, example)
        refused: tuple[Refused, ...] = ()
        while True:
            self._plan(targets, refused)
            transport = targets[0].choice.transport
            trials = Trials(
                transport,
                _links(targets),
                bucket_bytes=self._settings.bucket_bytes,
                gpu=self.hello.device,
                device=torch.device("cpu") if example is None else example.device,
            )
            cause = _cause(trials.run(min(TRIAL_S, self._settings.link_s))) or self._measure(trials, targets, wanted)
            if not cause:
                self._tell(targets, refused)
                return transport
            refused = (*refused, Refused(transport=transport, cause=cause))
            for target in targets:
                target.drop_links()  # what a link that failed still has in it belongs to nobody

    def _plan(self, targets: Sequence[Target], refused: tuple[Refused, ...]) -> None:
        wanted = msgspec.structs.replace(self._policy, excluded=refused)
        engines = [(target.client.info, target.client.way) for target in targets]
        try:
            choices = plan(self.hello, engines, wanted)
        except PlanError:
            self._warn(refused, "nothing")
            raise
        for target, chosen in zip(targets, choices, strict=True):
            target.connect(chosen, self._rank)

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
                self._rates = {key: trials.measure(wanted, self._settings.link_s)}
            except REFUSALS as error:
                return f"all links together: {short(error)}"
        self.rate = self._rates[key]
        return ""


def _said(choice: Choice) -> str:
    return choice.line("").removeprefix(": ")


def _links(targets: Sequence[Target]) -> dict[str, tuple[Link, FdWay]]:
    return {
        f"{target.client.name} worker {worker.rank}": (link, choice.fd)
        for target in targets
        for worker, link, choice in zip(target.client.info.workers, target.links, target.choices, strict=True)
    }


def _cause(ended: Sequence[Ended]) -> str:
    """The first link that failed and how many others did; "" if none did."""
    failed = [each for each in ended if each.cause]
    if not failed:
        return ""
    more = f" (and {len(failed) - 1} more links)" if len(failed) > 1 else ""
    return f"{failed[0].link}{more}: {failed[0].cause}"
