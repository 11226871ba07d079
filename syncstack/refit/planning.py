"""The plan of a whole refit: one transport over all links, told once for each engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from syncstack.errors import UsageError
from syncstack.facts import Hello, collect, say_hello
from syncstack.plan import Choice, Policy, check_devices, choose_common
from syncstack.refit.dial import Way
from syncstack.refit.messages import EngineInfo
from syncstack.settings import Settings
from syncstack.transports import SPOKEN
from syncstack.transports.cuda.placement import placement


def policy(settings: Settings) -> Policy:
    """The settings' part of the plan. Raises SettingsError for an unknown transport."""
    return Policy.of(settings.transport, strict=settings.strict, distinct_gpus=settings.distinct_gpus)


def trainer_hello(settings: Settings, rank: int) -> Hello:
    """What this trainer rank says of itself."""
    return say_hello("trainer", rank=rank, transports=SPOKEN, facts=collect(socket_dir=settings.socket_dir))


def placed(hello: Hello, example: torch.Tensor | None) -> Hello:
    """``hello`` with where the weights lie now, of which ``example`` is one: an offloaded model comes and goes."""
    device, memory = placement(example, hello.facts)
    return msgspec.structs.replace(hello, device=device, memory=memory)


Plans = list[list[Choice]]
"""For each engine, in order, the choice for each of its workers."""


def plan_ranks(senders: Sequence[Hello], engines: Sequence[tuple[EngineInfo, Way]], wanted: Policy) -> list[Plans]:
    """For each trainer rank, by rank, the plan of its links; all of one transport.

    With each engine goes the way by which it was reached. The same from any order of engines. Raises PlanError, and
    UsageError for two engines of one name: every report would mix them up.
    """
    links: dict[str, tuple[Hello, Hello]] = {}
    for rank, sender in enumerate(senders):
        for info, way in engines:
            ours = msgspec.structs.replace(sender, reachable=(way,))
            links.update({_link(info, n, rank): (ours, worker.hello) for n, worker in enumerate(info.workers)})
    if len(links) < len(senders) * sum(len(info.workers) for info, _ in engines):
        raise UsageError(
            "two engines of one refit have the same name",
            observed=", ".join(sorted(info.name for info, _ in engines)),
            next_step="start each with a --name of its own",
        )
    if wanted.distinct_gpus:
        of_first = {_link(info, n, 0) for info, _ in engines for n in range(len(info.workers))}
        check_devices({name: receiver for name, (_, receiver) in links.items() if name in of_first})
    choices = choose_common(links, wanted)
    return [
        [[choices[_link(info, n, rank)] for n in range(len(info.workers))] for info, _ in engines]
        for rank in range(len(senders))
    ]


def _link(info: EngineInfo, index: int, rank: int) -> str:
    return f"{info.name} worker {info.workers[index].rank}" + (f" from rank {rank}" if rank else "")
