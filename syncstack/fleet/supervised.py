"""An engine that can be started, killed and started again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from syncstack.fleet.process import GroupProcess


class Supervised(Protocol):
    """One engine, wherever it runs. Called from several threads, but ``start`` and ``kill`` one at a time."""

    name: str
    address: str
    """Of its control endpoint, the same after every start."""
    url: str
    """Of its own server."""

    def start(self) -> None:
        """Start it; does not wait until it answers. Raises EngineUnreachable where that cannot be asked for now."""
        ...

    def ended(self) -> str:
        """How it ended, or why it cannot be reached; "" while it runs. Does not block for long."""
        ...

    def kill(self) -> None:
        """End it and every process of its own, whatever state they are in. Blocks until they have ended; raises
        DeadlineExceeded."""
        ...


class EngineProcess(GroupProcess):
    """An engine on this machine: ``syncstack engine ...``, which ends with this process."""

    def __init__(
        self, name: str, *, address: str, url: str, argv: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        """``env``: its whole environment. ``log``: where its output is appended."""
        super().__init__(name, argv=argv, env=env, log=log)
        self.address = address
        self.url = url
