"""TCP, for a trainer and an engine that share no folder. A connection means nothing yet: ``wire/auth.py`` decides.

Addresses are ``tcp://HOST:PORT`` with an IPv4 address, an IPv6 address in brackets, or a name. To listen on a name is
to listen where the resolver says that this machine is known by it: on one network of several, say.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import time
from typing import Any, Self

import msgspec

from syncstack.errors import EngineUnreachable, PortTaken, SettingsError
from syncstack.facts.listeners import listeners
from syncstack.threads import in_thread

RETRY_S = 0.1
"""Between two attempts to connect."""

ATTEMPT_S = 3.0
"""How long one attempt may take: a lost SYN is sent again after 1 and 3 seconds."""

RESOLVE_S = 5.0
"""How long the resolver may take over a name to listen on."""

OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A peer whose machine is gone says nothing: asked after 10 s of silence, it is given up after 25; data that nobody
    # acknowledges, after 20.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)
"""Of every connection. Linux hands a listening socket's options on to those that it accepts."""


_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


class Address(msgspec.Struct, frozen=True):
    """Where somebody listens: an IPv4 or IPv6 address without brackets, or a name; and a port, 0 for any."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.netloc}"

    @property
    def netloc(self) -> str:
        """``HOST:PORT`` as URLs write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """``tcp://HOST:PORT``; raises SettingsError for anything else, an IPv6 address without brackets included."""
        scheme, separator, rest = text.partition("://")
        host, colon, port = rest.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1
        usable = _is_ipv6(host) if bracketed else _NAME.fullmatch(host) is not None
        if scheme != "tcp" or not separator or not colon or not usable or not 0 <= number <= 65535:
            raise SettingsError(
                f"address {text!r} cannot be used",
                expected="tcp://192.0.2.7:7000, tcp://[2001:db8::7]:7000 or tcp://name:7000",
                next_step="fix the address; an IPv6 address stands in brackets, without a zone",
            )
        return cls(host, number)

    @property
    def literal(self) -> bool:
        """Whether the host is an address and not a name."""
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(self.host)
            return True
        return False


def _is_ipv6(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.IPv6Address(host).scope_id is None  # a zone means something to one machine only
    return False


def listen(address: Address, *, backlog: int = 64) -> socket.socket:
    """A listening socket, close-on-exec; port 0 takes a free one, which ``address_of`` names. ``[::]`` takes both
    families. Raises PortTaken, which names the holder, and SettingsError where ``address`` cannot be listened on, or is
    a name of several addresses: some would not be listened on, and nobody would know which."""
    sock = listen_if_free(address, backlog=backlog)
    if sock is None:
        holder = listeners(address.port, address.port).get(address.port)
        by = "" if holder is None else f" by {holder}"
        raise _not_listened_on(address, f"{os.strerror(errno.EADDRINUSE)}{by}", PortTaken)
    return sock


def listen_if_free(address: Address, *, backlog: int = 64) -> socket.socket | None:
    """As ``listen``; None where the port is taken, without asking by whom, which takes a look at every process."""
    try:
        found = sorted({sockaddr[:2] for _, sockaddr in _resolve(address, time.monotonic() + RESOLVE_S)})
    except OSError as error:
        raise _not_listened_on(address, error.strerror or str(error)) from None
    if len(found) != 1:
        raise _not_listened_on(address, "it is " + " and ".join(host for host, _ in found))
    host = found[0][0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        for option in ((socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), *OPTIONS):
            sock.setsockopt(*option)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, address.port))
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise _not_listened_on(address, error.strerror or str(error)) from None
    return sock


def _not_listened_on(address: Address, observed: str, kind: type[SettingsError] = SettingsError) -> SettingsError:
    return kind(
        f"{address} cannot be listened on",
        observed=observed,
        expected="a free port of one address of this machine, or of 0.0.0.0 or [::]",
        consequence="The engine was not started",
        next_step="choose another address or port in --listen",
    )


def adopt(fd: int, address: Address) -> socket.socket:
    """The listening socket that this process was started with as descriptor ``fd``; raises SettingsError if it is
    not one on the port of ``address``."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise _not_adopted(fd, str(error), address) from None
    listening = sock.family in (socket.AF_INET, socket.AF_INET6) and bool(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )
    if not listening or address.port not in (0, address_of(sock).port):
        sock.detach()  # somebody else's
        raise _not_adopted(fd, "another socket", address)
    sock.set_inheritable(False)
    return sock


def _not_adopted(fd: int, observed: str, address: Address) -> SettingsError:
    return SettingsError(
        f"descriptor {fd} is not the engine's listening socket",
        observed=observed,
        expected=f"a socket that listens on {address}",
        next_step="unset SYNCSTACK_LISTEN_FD: `syncstack engine` sets it for the server that it becomes",
    )


def address_of(sock: socket.socket) -> Address:
    """The socket's own address."""
    host, port, *_ = sock.getsockname()
    return Address(host, port)


def peer_of(sock: socket.socket) -> Address:
    """The address of whom the socket is connected to. Raises EngineUnreachable where that one has hung up already: a
    process that was killed still takes connections for a moment."""
    try:
        host, port, *_ = sock.getpeername()
    except OSError as error:
        raise EngineUnreachable("the engine hung up at once", observed=error.strerror) from None
    return Address(host, port)


def connect(address: Address, *, deadline: float) -> socket.socket:
    """Connect, trying every address of a name again until ``deadline`` while nobody listens yet; raises
    EngineUnreachable with what was met last."""
    observed = "no attempt was made"
    while True:
        try:
            for family, sockaddr in _resolve(address, deadline):
                try:
                    return _attempt(family, sockaddr, deadline)
                except OSError as error:
                    observed = f"{sockaddr[0]}: {error.strerror or error}"
        except OSError as error:
            observed = error.strerror or str(error)
        if time.monotonic() + RETRY_S >= deadline:
            raise EngineUnreachable(f"nobody listens on {address}", observed=observed)
        time.sleep(RETRY_S)


def _resolve(address: Address, deadline: float) -> list[tuple[int, Any]]:
    if address.literal:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    else:
        # The resolver has no deadline of its own.
        future = in_thread(
            lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM), "syncstack-resolve"
        )
        try:
            found = future.result(max(0.01, deadline - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(f"name {address.host} was not resolved in time") from None
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]


def _attempt(family: int, sockaddr: Any, deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        for option in OPTIONS:
            sock.setsockopt(*option)
        sock.settimeout(min(ATTEMPT_S, max(0.05, deadline - time.monotonic())))
        sock.connect(sockaddr)
        if sock.getsockname() == sock.getpeername():
            # Nobody listens, and the kernel happened to pick the very port as ours: TCP then connects to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock
