"""TCP addresses and sockets: both families, deadlines, and connections that are not what they look like."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncstack.engines.listen import Listen
from syncstack.errors import EngineUnreachable, SettingsError
from syncstack.settings import Settings
from syncstack.wire import tcp
from syncstack.wire.tcp import Address

LOOPBACKS = ("127.0.0.1", "::1")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture(params=LOOPBACKS)
def host(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    yield request.param


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://127.0.0.1:7000", Address("127.0.0.1", 7000)),
        ("tcp://[::1]:7000", Address("::1", 7000)),
        ("tcp://[::]:0", Address("::", 0)),
        ("tcp://engine-0.engines.svc:65535", Address("engine-0.engines.svc", 65535)),
    ],
)
def test_c13_c14_an_address_is_read_and_written_as_it_was(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://",
        "tcp://:7000",
        "tcp://host",
        "tcp://host:",
        "tcp://host:70000",
        "tcp://host:-1",
        "tcp://host:7000/path",
        "tcp://user@host:7000",
        "tcp://fd00::1:7000",
        "tcp://[fd00::1]",
        "tcp://[fe80::1%eth0]:7000",
        "tcp://[127.0.0.1]:7000",
        "tcp:host:7000",
        "http://host:7000",
        "tcp://ho st:7000",
        "tcp://host:\u0667\u0660\u0660\u0660",
        "tcp://" + "x" * 64 + ":7000",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match=r"tcp://\[2001:db8::7\]:7000"):
        Address.parse(text)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_an_error(text: str) -> None:
    for each in (text, "tcp://" + text, f"tcp://{text}:1"):
        try:
            assert Address.parse(str(Address.parse(each))) == Address.parse(each)
        except SettingsError:
            continue


@pytest.mark.parametrize(
    ("listen", "folder", "worker"),
    [
        ("unix", Path("/run/syncstack/engine-0"), None),
        ("tcp://0.0.0.0:7000", None, Address("0.0.0.0", 7002)),
        ("unix, tcp://[::]:0", Path("/run/syncstack/engine-0"), Address("::", 0)),
    ],
)
def test_an_engine_listens_where_it_is_told(listen: str, folder: Path | None, worker: Address | None) -> None:
    found = Listen.of(Settings.load(listen=listen))
    assert (found.folder, found.worker(1)) == (folder, worker)


@pytest.mark.parametrize(
    "listen", ["", "unix,unix", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://[::]:1,tcp://0.0.0.0:1", "unix,"]
)
def test_an_engine_that_is_told_nonsense_says_so(listen: str) -> None:
    with pytest.raises(SettingsError, match="expected: .*tcp://"):
        Listen.of(Settings.load(listen=listen))


def test_a_worker_without_a_port_is_an_error() -> None:
    with pytest.raises(SettingsError, match="worker 1 has no port above"):
        Listen.of(Settings.load(listen="tcp://127.0.0.1:65534")).worker(1)


def test_both_families_meet_with_every_option_on_both_ends(host: str) -> None:
    with tcp.listen(Address(host, 0)) as listener:
        address = tcp.address_of(listener)
        assert address.host == host
        assert address.port > 0
        assert not listener.get_inheritable()
        with tcp.connect(address, deadline=time.monotonic() + 5) as near:
            far, _ = listener.accept()
            with far:
                assert tcp.peer_of(near) == address
                for sock in (near, far):
                    found = [sock.getsockopt(level, option) for level, option, _ in tcp.OPTIONS]
                    assert found == [value for _, _, value in tcp.OPTIONS]


def test_a_peer_that_has_hung_up_already_is_an_unreachable_engine(host: str) -> None:
    """A process that was killed still takes connections for a moment."""
    with (
        tcp.listen(Address(host, 0)) as listener,
        tcp.connect(tcp.address_of(listener), deadline=time.monotonic() + 5) as near,
    ):
        far, _ = listener.accept()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        far.close()
        with pytest.raises(EngineUnreachable, match="hung up at once"):
            tcp.peer_of(near)


def test_the_ipv6_wildcard_takes_ipv4_too() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    with tcp.listen(Address("::", 0)) as listener:
        port = tcp.address_of(listener).port
        for host in LOOPBACKS:
            tcp.connect(Address(host, port), deadline=time.monotonic() + 5).close()


def test_a_taken_port_an_odd_address_and_an_unknown_name_are_refused() -> None:
    with tcp.listen(Address("127.0.0.1", 0)) as listener, pytest.raises(SettingsError, match="Address already in use"):
        tcp.listen(tcp.address_of(listener))
    with pytest.raises(SettingsError, match="cannot be listened on"):
        tcp.listen(Address("192.0.2.1", 0))  # TEST-NET: nobody's address
    with pytest.raises(SettingsError, match=r"tcp://nowhere.invalid:0 cannot be listened on \(observed: .*a free port"):
        tcp.listen(Address("nowhere.invalid", 0))


def test_a_name_is_listened_on_where_this_machine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"one.link": ["127.0.0.9"], "two.link": ["127.0.0.9", "127.0.0.8"]}
    real = socket.getaddrinfo

    def resolver(host: str, *args: Any, **options: Any) -> Any:
        return [each for literal in names.get(host, [host]) for each in real(literal, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    with tcp.listen(Address("one.link", 0)) as listener:
        assert tcp.address_of(listener).host == "127.0.0.9"
        tcp.connect(tcp.address_of(listener), deadline=time.monotonic() + 5).close()
    with pytest.raises(SettingsError, match="observed: it is 127.0.0.8 and 127.0.0.9;"):
        tcp.listen(Address("two.link", 0))


def test_nobody_there_is_an_error_at_the_deadline_with_its_cause() -> None:
    with tcp.listen(Address("127.0.0.1", 0)) as listener:
        address = tcp.address_of(listener)
    begin = time.monotonic()
    with pytest.raises(
        EngineUnreachable, match=rf"nobody listens on {address} \(observed: 127.0.0.1: Connection refus"
    ):
        tcp.connect(address, deadline=begin + 0.5)
    assert time.monotonic() - begin < 2.0


def test_c08_a_name_that_nobody_knows_is_an_error_at_the_deadline() -> None:
    begin = time.monotonic()
    with pytest.raises(EngineUnreachable, match="nobody listens on tcp://no-such-host.invalid:1"):
        tcp.connect(Address("no-such-host.invalid", 1), deadline=begin + 0.5)
    assert time.monotonic() - begin < 5.0


def test_a_resolver_that_hangs_is_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(10))
    begin = time.monotonic()
    try:
        with pytest.raises(EngineUnreachable, match="was not resolved in time"):
            tcp.connect(Address("engine", 1), deadline=begin + 0.3)
        assert time.monotonic() - begin < 2.0
    finally:
        release.set()


def test_c09_a_listener_that_starts_late_is_waited_for() -> None:
    with tcp.listen(Address("127.0.0.1", 0)) as listener:
        address = tcp.address_of(listener)
    later: list[socket.socket] = []
    timer = threading.Timer(0.4, lambda: later.append(tcp.listen(address)))
    timer.start()
    tcp.connect(address, deadline=time.monotonic() + 10).close()
    timer.join()
    later[0].close()


def test_a_socket_that_connected_to_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Happens by chance where the port lies in the range of outgoing connections; here the chance is helped along."""
    with tcp.listen(Address("127.0.0.1", 0)) as listener:
        address = tcp.address_of(listener)

    class Bound(socket.socket):
        def connect(self, target: object) -> None:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(target)  # type: ignore[arg-type]
            super().connect(target)  # type: ignore[arg-type]
            assert self.getsockname() == self.getpeername()

    monkeypatch.setattr(socket, "socket", Bound)
    with pytest.raises(EngineUnreachable, match="Connection refused"):
        tcp.connect(address, deadline=time.monotonic() + 0.3)


def test_c06_a_listening_socket_is_handed_over_through_exec() -> None:
    """From `syncstack engine` to the server that it becomes: the port is never free in between."""
    with tcp.listen(Address("127.0.0.1", 0)) as listener:
        address = tcp.address_of(listener)
        code = f"""
from syncstack.wire import tcp
sock = tcp.adopt({listener.fileno()}, tcp.Address.parse("{address}"))
assert not sock.get_inheritable()
sock.accept()[0].sendall(b"adopted")
"""
        child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[listener.fileno()])
        listener.close()
    with tcp.connect(address, deadline=time.monotonic() + 10) as sock:
        sock.settimeout(20)
        assert sock.recv(10) == b"adopted"
    assert child.wait(10) == 0


def test_another_descriptor_is_not_adopted_and_stays_open() -> None:
    near, far = socket.socketpair()
    with near, far, tcp.listen(Address("127.0.0.1", 0)) as listener, open(os.devnull) as null:
        for fd, match in ((near.fileno(), "another socket"), (null.fileno(), "not a socket|non-socket")):
            with pytest.raises(SettingsError, match=f"(?i)descriptor {fd} is not .*({match})"):
                tcp.adopt(fd, Address("127.0.0.1", 7000))
        with pytest.raises(SettingsError, match="another socket"):
            tcp.adopt(listener.fileno(), Address("127.0.0.1", 1))
        for fd in (near.fileno(), listener.fileno(), null.fileno()):
            os.fstat(fd)
