"""Engines that are started, watched, and brought back to the current version. Only this package may import ray.

::

    from syncstack.fleet import EngineProcess, Fleet

    engine = EngineProcess("engine-0", address=..., url=..., argv=..., env=..., log=...)
    with Fleet([engine], settings=settings) as fleet:
        fleet.start()
        fleet.attach(ModuleSource(model))
        fleet.refit(version=1)
"""

from syncstack.fleet.fleet import Fleet
from syncstack.fleet.states import EngineState, Policy, State
from syncstack.fleet.supervised import EngineProcess, Supervised

__all__ = ["EngineProcess", "EngineState", "Fleet", "Policy", "State", "Supervised"]
