"""The plan of a whole refit: one transport over all links, told once for each engine."""

from __future__ import annotations

from collections.abc import Sequence

from syncstack.errors import UsageError
from syncstack.facts import Hello, collect, say_hello
from syncstack.plan import Choice, Policy, check_devices, choose_common
from syncstack.refit.messages import EngineInfo
from syncstack.settings import Settings
from syncstack.transports import SPOKEN


def policy(settings: Settings) -> Policy:
    """The settings' part of the plan. Raises SettingsError for an unknown transport."""
    return Policy.of(settings.transport, strict=settings.strict, distinct_gpus=settings.distinct_gpus)


def trainer_hello(settings: Settings, rank: int) -> Hello:
    """What this trainer rank says of itself to engines that it has reached by their sockets: there is no other way."""
    facts = collect(socket_dir=settings.socket_dir)
    return say_hello("trainer", rank=rank, transports=SPOKEN, reachable=("unix",), facts=facts)


def plan(sender: Hello, engines: Sequence[EngineInfo], wanted: Policy) -> list[Choice]:
    """One choice for each engine, in order, all of one transport; an engine's first worker speaks for it.

    The same from any order of engines, and on every rank whose hello says the same. Raises PlanError, and UsageError
    for two engines of one name: every report would mix them up.
    """
    workers = {_link(info, index): info.workers[index].hello for info in engines for index in range(len(info.workers))}
    if len(workers) < sum(len(info.workers) for info in engines):
        raise UsageError(
            "two engines of one refit have the same name",
            observed=", ".join(sorted(info.name for info in engines)),
            next_step="start each with a --name of its own",
        )
    if wanted.distinct_gpus:
        check_devices(workers)
    choices = choose_common({name: (sender, hello) for name, hello in workers.items()}, wanted)
    return [choices[_link(info, 0)] for info in engines]


def _link(info: EngineInfo, index: int) -> str:
    return f"{info.name} worker {info.workers[index].rank}"
