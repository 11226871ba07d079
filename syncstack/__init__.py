"""syncstack: moves a trainer's weights into inference engines inside locked-down containers.

::

    from syncstack import Coordinator, EngineClient, ModuleSource, Settings

    settings = Settings.load()
    engine = EngineClient.connect("unix:/run/syncstack/engine-0", settings=settings)
    with Coordinator(source=ModuleSource(model), engines=[engine], settings=settings) as coordinator:
        coordinator.refit(version=1)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncstack.errors import SyncstackError
    from syncstack.refit.client import EngineClient
    from syncstack.refit.coordinator import Coordinator
    from syncstack.refit.follower import Follower
    from syncstack.refit.ranks import Ranks
    from syncstack.refit.report import RefitReport
    from syncstack.settings import Settings
    from syncstack.weights.meta import ParamMeta
    from syncstack.weights.source import ModuleSource, WeightSource

__all__ = [
    "Coordinator",
    "EngineClient",
    "Follower",
    "ModuleSource",
    "ParamMeta",
    "Ranks",
    "RefitReport",
    "Settings",
    "SyncstackError",
    "WeightSource",
]

# Loaded on first use: `syncstack doctor` must not wait for torch, and facts, plan and wire work without it.
_HOME = {
    "Coordinator": "syncstack.refit.coordinator",
    "EngineClient": "syncstack.refit.client",
    "Follower": "syncstack.refit.follower",
    "ModuleSource": "syncstack.weights.source",
    "ParamMeta": "syncstack.weights.meta",
    "Ranks": "syncstack.refit.ranks",
    "RefitReport": "syncstack.refit.report",
    "Settings": "syncstack.settings",
    "SyncstackError": "syncstack.errors",
    "WeightSource": "syncstack.weights.source",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
