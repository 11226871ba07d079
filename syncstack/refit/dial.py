"""The ways to an engine: the folder that it shares with the trainer, or TCP and a token."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Protocol

import httpx

from syncstack.errors import LinkRefused, UsageError
from syncstack.refit.messages import WorkerInfo
from syncstack.settings import Settings
from syncstack.wire import tcp, unix
from syncstack.wire.auth import prove_as_trainer
from syncstack.wire.link import Link
from syncstack.wire.tcp import Address

Way = Literal["unix", "tcp"]


class Dial(Protocol):
    """How one engine is reached. Used from one thread."""

    name: str
    """What messages call the engine before it has told its name."""
    hint: str
    """What to look at when nobody answers."""

    @property
    def way(self) -> Way:
        """By what it is reached."""
        ...

    @property
    def address(self) -> str:
        """What ``dial`` takes for it, by which another process reaches this same engine."""
        ...

    def probe(self, *, deadline: float) -> None:
        """Connect to the control endpoint and hang up. Raises EngineUnreachable, or UsageError where waiting longer
        cannot help."""
        ...

    def http(self, timeout_s: float) -> httpx.Client:
        """A client of the control endpoint that the last ``probe`` reached."""
        ...

    def link(self, worker: WorkerInfo, *, rank: int, deadline: float) -> Link:
        """A data link to one worker, whose peer is known to be one of ours; not greeted yet."""
        ...


class UnixDial:
    """An engine's folder in a volume that trainer and engine share. The kernel says who answers."""

    way: Way = "unix"

    def __init__(self, folder: Path) -> None:
        if not os.access(folder.parent, os.X_OK):
            raise UsageError(
                f"socket folder {folder.parent} does not exist here, or may not be entered",
                next_step="mount the volume that the engine uses at SYNCSTACK_SOCKET_DIR",
            )
        self._folder = folder
        self.name = folder.name
        self.hint = "is the same volume mounted in both containers?"
        self.address = f"unix:{folder}"

    def probe(self, *, deadline: float) -> None:
        """See Dial."""
        unix.connect(self._folder / "control.sock", deadline=deadline).close()

    def http(self, timeout_s: float) -> httpx.Client:
        """See Dial."""
        transport = httpx.HTTPTransport(uds=str(self._folder / "control.sock"))
        return httpx.Client(transport=transport, base_url="http://engine", timeout=timeout_s)

    def link(self, worker: WorkerInfo, *, rank: int, deadline: float) -> Link:
        """See Dial."""
        del rank
        if not worker.socket:
            raise LinkRefused(f"worker {worker.rank} has no socket in the engine's folder")
        return Link(unix.connect(self._folder / Path(worker.socket).name, deadline=deadline))


class TcpDial:
    """An engine's TCP address. Both sides prove the token on every connection."""

    way: Way = "tcp"

    def __init__(self, address: Address, settings: Settings) -> None:
        self._token = settings.required_token(f"connecting to {address}")
        self._address = address
        self._reached = address
        self.name = str(address)
        self.hint = "does it listen there (SYNCSTACK_LISTEN), and may this container connect to it?"

    @property
    def address(self) -> str:
        """See Dial."""
        return str(self._reached)

    def probe(self, *, deadline: float) -> None:
        """See Dial. Keeps to the address that answered: a name may stand for several engines."""
        with tcp.connect(self._address, deadline=deadline) as sock:
            self._reached = tcp.peer_of(sock)

    def http(self, timeout_s: float) -> httpx.Client:
        """See Dial. No proxy and no .netrc of the environment gets to see the bearer."""
        return httpx.Client(
            transport=httpx.HTTPTransport(trust_env=False, socket_options=tcp.OPTIONS),
            base_url=f"http://{self._reached.netloc}",
            headers={"Authorization": self._token.authorization},
            timeout=timeout_s,
            trust_env=False,
        )

    def link(self, worker: WorkerInfo, *, rank: int, deadline: float) -> Link:
        """See Dial. The engine cannot know by which address it is reached, so it names its workers' ports only."""
        if not worker.port:
            raise LinkRefused(f"worker {worker.rank} does not listen on TCP")
        link = Link(tcp.connect(Address(self._reached.host, worker.port), deadline=deadline))
        try:
            prove_as_trainer(link, self._token, rank=rank, worker=worker.rank, deadline=deadline)
        except BaseException:
            link.close()
            raise
        return link


def dial(address: str, settings: Settings) -> Dial:
    """The way that an address names: ``unix:/folder/of/the/engine`` or ``tcp://host:port``. Raises UsageError."""
    scheme, _, path = address.partition(":")
    if scheme == "unix" and path.startswith("/"):
        return UnixDial(Path(path))
    if scheme == "tcp":
        return TcpDial(Address.parse(address), settings)
    raise UsageError(
        f"engine address {address!r} cannot be used",
        expected="unix:/folder/of/the/engine or tcp://host:port",
        next_step="fix --engine",
    )
