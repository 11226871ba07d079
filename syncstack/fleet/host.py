"""What runs in an actor, one for each container: starts one command there, ends it, and says how it is.

The command has the environment that the node was started with, not the actor's: Ray sets thread counts and visible
devices of its own. It ends with the actor, and the actor with its node.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from syncstack.errors import UsageError
from syncstack.fleet.node import own_environment
from syncstack.fleet.process import GroupProcess
from syncstack.settings import Settings
from syncstack.wire.tcp import Address

READ_BYTES = 1 << 16
"""Of output that one call gives back at most."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's node, in its own words."""

    name: str
    address: str
    url: str


class Host:
    """One container's. Every call but ``start`` and ``kill`` answers at once."""

    def __init__(self) -> None:
        self._settings = Settings.load()
        self._process: GroupProcess | None = None
        self._log: Path | None = None

    def about(self) -> bytes:
        """Where this node's engine will be reached: an ``About``, as JSON. Raises UsageError."""
        settings = self._settings
        return msgspec.json.encode(
            About(name=settings.engine_name, address=engine_address(settings), url=_url(settings))
        )

    def start(self, argv: Sequence[str], env: Mapping[str, str], *, keep_output: bool = False) -> None:
        """Start a command, after the last one was ended. Its output goes where the node's does, which is what
        ``docker logs`` shows; with ``keep_output`` to a file that ``read`` reads."""
        self.kill()
        own = Path(f"/proc/{self._settings.node_pid}")
        whole = own_environment((own / "environ").read_bytes()) | dict(env)
        self._log = own / "fd/1"
        if keep_output:
            self._log = Path(tempfile.mkdtemp(prefix="syncstack-")) / "output"
        self._process = GroupProcess(self._settings.engine_name, argv=argv, env=whole, log=self._log)
        self._process.start()

    def read(self, offset: int) -> bytes:
        """The next bytes that the command has written."""
        assert self._log is not None
        with self._log.open("rb") as log:
            log.seek(offset)
            return log.read(READ_BYTES)

    def status(self) -> int | None:
        """The command's exit status, negative for a signal; None while it runs."""
        assert self._process is not None
        return self._process.status()

    def ended(self) -> str:
        """How the command ended; "" while it runs."""
        return "it was never started" if self._process is None else self._process.ended()

    def signal(self, number: int) -> None:
        """Send the command's process group a signal."""
        if self._process is not None:
            self._process.signal(number)

    def kill(self) -> None:
        """End the command's whole process group. Raises DeadlineExceeded."""
        if self._process is not None:
            self._process.kill()


def engine_address(settings: Settings) -> str:
    """Where a trainer elsewhere reaches the control endpoint of this node's engine, after every start the same: TCP
    where the engine listens there, else its folder. Raises UsageError."""
    ways = [way.strip() for way in settings.listen.split(",")]
    over_tcp = next((way for way in ways if way.startswith("tcp://")), None)
    if over_tcp is None:
        return f"unix:{settings.socket_dir / settings.engine_name}"
    if not over_tcp.endswith((":auto", ":0")) and Address.parse(over_tcp).host not in ("0.0.0.0", "::"):  # noqa: S104
        return over_tcp
    raise UsageError(
        f"nobody elsewhere can know where an engine that listens on {over_tcp} is reached",
        expected="tcp://ADDRESS:PORT, with an address and a port of its own",
        next_step="fix SYNCSTACK_LISTEN of the engine's node",
    )


def _url(settings: Settings) -> str:
    if settings.engine_url:
        return settings.engine_url
    raise UsageError(
        f"nobody said where the server of {settings.engine_name} will be reached",
        next_step="set SYNCSTACK_ENGINE_URL of the engine's node to http://HOST:PORT",
    )
