"""Interfaces and addresses of this process's network namespace, limits of those who listen, and the way to a peer.

Not from /sys/class/net: a container's /sys may show another namespace than the one its processes are in.
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

from syncstack.errors import UsageError
from syncstack.facts.model import Interface, NetworkFacts, Route
from syncstack.facts.process import read_text

_SIOCGIFCONF: Final = 0x8912
_SIOCGIFFLAGS: Final = 0x8913
_SIOCGIFMTU: Final = 0x8921
_UP: Final = 0x1
_LOOPBACK: Final = 0x8
_IFREQ: Final = struct.Struct("16s24s")
_MAX_ADDRESSES: Final = 1024
_DISCARD_PORT: Final = 9

_Addresses = dict[str, list[str]]


def _ipv4(sock: socket.socket) -> _Addresses:
    """Return the addresses by interface; a label such as ``eth0:1`` is the interface's."""
    buffer = array.array("B", bytes(_IFREQ.size * _MAX_ADDRESSES))
    answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iL", len(buffer), buffer.buffer_info()[0]))
    used: int = struct.unpack("iL", answer)[0]
    found: _Addresses = {}
    for label, address in _IFREQ.iter_unpack(buffer.tobytes()[:used]):
        name = label.partition(b"\0")[0].decode(errors="replace").partition(":")[0]
        found.setdefault(name, []).append(socket.inet_ntoa(address[4:8]))
    return found


def _ipv6() -> _Addresses:
    found: _Addresses = {}
    for line in read_text(Path("/proc/self/net/if_inet6")).splitlines():
        words = line.split()
        if len(words) == 6:
            found.setdefault(words[5], []).append(str(ipaddress.IPv6Address(bytes.fromhex(words[0]))))
    return found


def _asked(sock: socket.socket, request: int, name: str, shape: str) -> int:
    """Return one number about an interface, 0 where it is gone."""
    try:
        answer = fcntl.ioctl(sock, request, _IFREQ.pack(name.encode()[:15], b""))
    except OSError:
        return 0
    return int(struct.unpack_from(shape, answer, 16)[0])


def interfaces() -> tuple[Interface, ...]:
    """Return the interfaces in the kernel's order; none where no socket can be made."""
    names = [line.partition(":")[0].strip() for line in read_text(Path("/proc/self/net/dev")).splitlines()[2:]]
    ipv6, found = _ipv6(), []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            ipv4 = _ipv4(sock)
            for name in names:
                flags = _asked(sock, _SIOCGIFFLAGS, name, "H")
                interface = Interface(
                    name=name,
                    up=bool(flags & _UP),
                    loopback=bool(flags & _LOOPBACK),
                    mtu=_asked(sock, _SIOCGIFMTU, name, "i"),
                    ipv4=tuple(ipv4.get(name, ())),
                    ipv6=tuple(ipv6.get(name, ())),
                )
                found.append(interface)
    except OSError:
        return ()
    return tuple(found)


def _numbers(path: Path) -> list[int]:
    return [int(word) for word in read_text(path).split() if word.isdigit()]


def network(sysctls: Path = Path("/proc/sys/net")) -> NetworkFacts:
    """Return the facts of this process's network namespace."""
    ports = _numbers(sysctls / "ipv4/ip_local_port_range")
    somaxconn = _numbers(sysctls / "core/somaxconn")
    start = _numbers(sysctls / "ipv4/ip_unprivileged_port_start")
    return NetworkFacts(
        interfaces=interfaces(),
        ephemeral_low=ports[0] if len(ports) == 2 else 0,
        ephemeral_high=ports[1] if len(ports) == 2 else 0,
        somaxconn=somaxconn[0] if somaxconn else 0,
        unprivileged_port_start=start[0] if start else 1024,
        evidence="SIOCGIFCONF, /proc/self/net/dev, /proc/self/net/if_inet6, /proc/sys/net",
    )


def route_to(address: str) -> Route:
    """Return by which interface and source address ``address`` (IPv4 or IPv6 in numbers) is reached.

    A datagram socket is connected, which asks the kernel's routes and sends nothing. Raises UsageError for a name:
    resolving one may take any time.
    """
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        raise UsageError("not an address", observed=repr(address), expected="IPv4 or IPv6, in numbers") from None
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    shown = f"connect of a datagram socket to {address}"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            target = socket.getaddrinfo(address, _DISCARD_PORT, family, socket.SOCK_DGRAM, 0, socket.AI_NUMERICHOST)
            sock.connect(target[0][4])
            source = str(sock.getsockname()[0]).partition("%")[0]
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "") or str(error)
        return Route(interface="", source="", evidence=f"{shown}: {name}")
    names = [each.name for each in interfaces() if source in (*each.ipv4, *each.ipv6)]
    name = names[0] if names else ""
    return Route(interface=name, source=source, evidence=f"{shown}: from {source} on {name or 'an unknown interface'}")
