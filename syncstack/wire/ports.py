"""Ports that nobody else uses by chance: a band for each purpose, below those that the kernel gives to outgoing
connections. A port is taken by listening on it, and the socket is what is handed over: never a number that was free.

A cursor for each band, in a file that the processes of one user on one machine share, lets each take the next ports
and not those that another has just given up. Where the file cannot be had, everybody looks from the band's beginning,
and the kernel still gives a port to one of them only.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from syncstack.errors import SettingsError
from syncstack.facts.listeners import listeners
from syncstack.facts.model import NetworkFacts
from syncstack.wire import tcp
from syncstack.wire.tcp import Address

DEFAULT = (
    "ray=20000-20999,rendezvous=21000-21499,http=22000-22499,control=22500-22999,data=23000-23999,"
    "metrics=24000-24499,router=24500-24999"
)
"""Below the kernel's usual 32768, and below the 30000 from which Kubernetes gives out node ports."""

_BAND = re.compile(r"([a-z]+)=(\d{1,5})-(\d{1,5})")


class Band(msgspec.Struct, frozen=True):
    """Ports ``low`` to ``high``, both of them its own."""

    name: str
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.name} ({self.low}-{self.high})"


def parse(text: str) -> dict[str, Band]:
    """``NAME=LOW-HIGH,...`` over the default bands. Raises SettingsError for anything else, for a name that is not
    known, and for bands that overlap."""
    bands = dict(_read(DEFAULT))
    given = dict(_read(text)) if text else {}
    unknown = given.keys() - bands.keys()
    if unknown:
        raise _bad(text, f"{min(unknown)} is no band", ", ".join(bands))
    bands.update(given)
    ordered = sorted(bands.values(), key=lambda band: band.low)
    for one, other in itertools.pairwise(ordered):
        if other.low <= one.high:
            raise _bad(text, f"{one} and {other} overlap", "bands apart from each other")
    return bands


def _read(text: str) -> Iterator[tuple[str, Band]]:
    for part in text.split(","):
        match = _BAND.fullmatch(part.strip())
        if match is None:
            raise _bad(text, repr(part), "NAME=LOW-HIGH")
        band = Band(match[1], int(match[2]), int(match[3]))
        if not 1024 <= band.low <= band.high <= 65535:
            raise _bad(text, str(band), "1024 to 65535, the lower first")
        yield band.name, band


def _bad(text: str, observed: str, expected: str) -> SettingsError:
    return SettingsError(
        f"port bands {text!r} cannot be used",
        observed=observed,
        expected=expected,
        next_step="fix SYNCSTACK_PORT_BANDS, or unset it",
    )


def check(bands: Mapping[str, Band], network: NetworkFacts) -> None:
    """Raise SettingsError where the kernel may give a band's port to an outgoing connection, or to root only."""
    low, high, start = network.ephemeral_low, network.ephemeral_high, network.unprivileged_port_start
    for band in bands.values():
        if band.low <= high and low <= band.high:
            raise SettingsError(
                f"the band {band} overlaps the ports of outgoing connections",
                observed=f"net.ipv4.ip_local_port_range {low}-{high}",
                consequence="A port of it is taken now and then by a connection that has nothing to do with it",
                next_step='sysctl net.ipv4.ip_local_port_range="32768 60999" (compose: sysctls; Kubernetes: a safe '
                "sysctl of the pod), or other SYNCSTACK_PORT_BANDS",
            )
        if band.low < start:
            raise SettingsError(
                f"users may not listen on the band {band}", observed=f"net.ipv4.ip_unprivileged_port_start {start}"
            )


def take(band: Band, host: str, count: int = 1) -> list[socket.socket]:
    """Listening sockets on ``count`` consecutive ports of a band at ``host`` (an address of this machine, or a name).

    Raises SettingsError where the band has no such block, and names who holds its ports; nothing is held then.
    """
    size = band.high - band.low + 1
    with _cursor(band) as cursor:
        start = cursor.at if band.low <= cursor.at <= band.high else band.low
        for step in range(size):
            first = band.low + (start - band.low + step) % size
            if first + count - 1 > band.high:
                continue
            sockets = _block(host, first, count)
            if sockets:
                cursor.at = first + count
                return sockets
    held = [f"{port} {holder}" for port, holder in listeners(band.low, band.high).items()]
    raise SettingsError(
        f"the band {band} has no {count} consecutive ports left",
        observed=("; ".join(held[:10]) + (f" and {len(held) - 10} more" if len(held) > 10 else "")) or "nobody listens",
        next_step="end who holds them, or set a larger band in SYNCSTACK_PORT_BANDS",
    )


def _block(host: str, first: int, count: int) -> list[socket.socket]:
    """All of a block, or none of it."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for port in range(first, first + count):
            sock = tcp.listen_if_free(Address(host, port))
            if sock is None:
                return []
            sockets.append(stack.enter_context(sock))
        stack.pop_all()
        return sockets


class _Cursor:
    def __init__(self, at: int) -> None:
        self.at = at


@contextlib.contextmanager
def _cursor(band: Band) -> Iterator[_Cursor]:
    """Where the last one stopped; others wait while the block runs. Read as a number or not at all."""
    path = Path(tempfile.gettempdir()) / f"syncstack-ports-{os.getuid()}-{band.name}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield _Cursor(band.low)
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        text = os.pread(fd, 8, 0)
        cursor = _Cursor(int(text) if text.isdigit() else band.low)
        yield cursor
        if os.fstat(fd).st_uid == os.getuid():  # somebody else's is not written
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(cursor.at).encode(), 0)
    finally:
        os.close(fd)
