"""The ways into an engine: its folder, TCP, or both, as ``SYNCSTACK_LISTEN`` says."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Self

import msgspec

from syncstack.errors import SettingsError
from syncstack.facts.network import network
from syncstack.settings import Settings
from syncstack.wire import tcp, unix
from syncstack.wire.ports import Band, check, parse, take
from syncstack.wire.tcp import Address

AUTO = ":auto"


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where the control endpoint and the workers of one engine listen; at least one of the two is set."""

    folder: Path | None = None
    tcp: Address | None = None
    auto: bool = False
    """Whether its ports are the next ones of their bands; that of ``tcp`` is 0 then."""
    bands: dict[str, Band] = {}

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Read ``settings.listen``; raises SettingsError for anything but ``unix`` and one TCP address."""
        folder, address, auto = None, None, False
        for way in settings.listen.split(","):
            if way.strip() == "unix" and folder is None:
                folder = settings.socket_dir / settings.engine_name
            elif way.strip().startswith("tcp://") and address is None:
                where = way.strip()
                auto = where.endswith(AUTO)
                address = Address.parse(where.removesuffix(AUTO) + ":0" if auto else where)
            else:
                raise SettingsError(
                    f"the engine cannot listen on {settings.listen!r}",
                    expected="unix, tcp://ADDRESS:PORT (or :auto), or both, separated by a comma",
                    next_step="fix --listen or SYNCSTACK_LISTEN",
                )
        bands = parse(settings.port_bands)
        if auto:
            check(bands, network())
        return cls(folder=folder, tcp=address, auto=auto, bands=bands)

    def open_control(self) -> socket.socket:
        """The listening socket of the control endpoint on TCP. Raises SettingsError."""
        assert self.tcp is not None
        return take(self.bands["control"], self.tcp.host)[0] if self.auto else tcp.listen(self.tcp)

    def open_worker(self, rank: int) -> socket.socket | None:
        """The listening socket of the worker of ``rank``, which is that worker's own process; None without TCP. Raises
        SettingsError."""
        if self.tcp is not None and self.auto:
            return take(self.bands["data"], self.tcp.host)[0]
        address = self.worker(rank)
        return None if address is None else tcp.listen(address)

    def worker(self, rank: int) -> Address | None:
        """Where the worker of ``rank`` listens on TCP; each binds its port itself."""
        if self.tcp is None or self.tcp.port == 0:
            return self.tcp
        port = self.tcp.port + 1 + rank
        if port > 65535:
            raise SettingsError(
                f"worker {rank} has no port above that of {self.tcp}", next_step="choose a lower port in --listen"
            )
        return Address(self.tcp.host, port)


def claim(settings: Settings) -> Settings:
    """Take the engine's folder and port now, and not after a minute of loading a model. Returns the settings with the
    open socket in ``listen_fd``. Raises SettingsError or UsageError; nothing is held then.

    The port stays taken from here on: trying it and letting it go would leave it to whoever comes first.
    """
    listen = Listen.of(settings)
    if listen.folder is not None:
        unix.prepare_folder(listen.folder)
    if listen.tcp is None:
        return settings
    settings.required_token(f"listening on {listen.tcp}")
    return settings.model_copy(update={"listen_fd": listen.open_control().detach()})


def control_sockets(listen: Listen, settings: Settings) -> list[socket.socket]:
    """The listening sockets of the control endpoint; that of TCP is the one that ``claim`` opened, where it did."""
    sockets = []
    if listen.tcp is not None:
        fd = settings.listen_fd
        sockets.append(listen.open_control() if fd is None else tcp.adopt(fd, listen.tcp))
    if listen.folder is not None:
        sockets.append(unix.listen(listen.folder / "control.sock"))
    return sockets
