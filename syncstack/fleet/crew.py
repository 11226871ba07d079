"""The fleet that ``syncstack launch`` has placed, for the trainer's process that it has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from syncstack.errors import SettingsError
from syncstack.fleet.cluster import connected, host_named
from syncstack.fleet.fleet import Fleet
from syncstack.fleet.placement import FleetSpec
from syncstack.fleet.remote import RayEngine
from syncstack.fleet.states import Policy
from syncstack.run.crew import Crew
from syncstack.settings import Settings
from syncstack.weights.source import WeightSource


@contextmanager
def placed(settings: Settings) -> Iterator[Fleet]:
    """The fleet of this process's launch, started; it ends with the block, unless it was launched to stay. Raises what
    ``Fleet.start`` does, EngineUnreachable, and SettingsError outside of a launch."""
    spec = fleet_spec(settings)
    with connected(spec.cluster):
        engines = [RayEngine(host_named(name), spec.command) for name in spec.engines]
        with Fleet(engines, settings=settings, policy=Policy.of(settings), stay=spec.stay) as fleet:
            fleet.start()
            yield fleet


@contextmanager
def crew(settings: Settings) -> Iterator[Crew]:
    """As ``placed``, for ``syncstack run``."""
    with placed(settings) as fleet:
        clients = fleet.connect()

        def attach(source: WeightSource) -> Fleet:
            fleet.attach(source)
            return fleet

        yield Crew(clients, [fleet.url(client.name) for client in clients], attach)


def fleet_spec(settings: Settings) -> FleetSpec:
    """What ``syncstack launch`` said. Raises SettingsError."""
    try:
        return msgspec.json.decode(settings.fleet, type=FleetSpec)
    except msgspec.DecodeError as error:
        raise SettingsError(
            "this process was not started by syncstack launch",
            observed=f"SYNCSTACK_FLEET: {error}",
            next_step="start it by `syncstack launch -- COMMAND`, or make a Fleet of your own engines",
        ) from None
