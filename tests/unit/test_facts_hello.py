"""The hello: what it says, how it is written and read, and the network facts that need no special process."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from syncstack.cli import app
from syncstack.errors import UsageError
from syncstack.facts import Hello, collect, process_nonce, read_hello, route_to, say_hello
from syncstack.facts.hello import MAX_HELLO_BYTES
from syncstack.facts.memory import chosen, meminfo, memory, numbers
from syncstack.facts.network import interfaces, network
from syncstack.facts.process import life
from syncstack.transports import SPOKEN


@pytest.fixture(scope="module")
def hello() -> Hello:
    return say_hello("engine", rank=1, name="engine-0", transports=("host_fd",), reachable=("unix",))


def test_a_hello_names_its_process(hello: Hello) -> None:
    assert (hello.role, hello.rank, hello.name, hello.pid) == ("engine", 1, "engine-0", os.getpid())
    assert (hello.transports, hello.reachable, hello.device, hello.memory) == (("host_fd",), ("unix",), "", "host")
    assert hello.nonce == process_nonce()
    assert len(hello.nonce) == 32
    found = life()
    assert found is not None
    assert hello.start_ticks == found[1]
    own = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert hello.start_ticks == int(own[19])
    assert hello.facts.pid == hello.pid


def test_life_survives_a_name_with_brackets_and_spaces() -> None:
    name = Path("/proc/self/comm").read_text()
    before = life()
    try:
        Path("/proc/self/comm").write_text("a) R 1 (b")
        assert life() == before
        assert before is not None
    finally:
        Path("/proc/self/comm").write_text(name)
    assert life(2**22 + 1) is None


def test_given_facts_are_not_collected_again(hello: Hello) -> None:
    assert say_hello("trainer", facts=hello.facts).facts is hello.facts


def test_what_is_written_is_read(tmp_path: Path, hello: Hello) -> None:
    path = tmp_path / "hello.json"
    path.write_bytes(msgspec.json.encode(hello))
    assert read_hello(path) == hello


def changed(hello: Hello, **fields: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(hello), **fields})


def test_another_version_is_named(tmp_path: Path, hello: Hello) -> None:
    """Also where the rest has a shape that only that version knows."""
    path = tmp_path / "hello.json"
    path.write_bytes(changed(hello, version=7, pid={"new": "shape"}))
    with pytest.raises(UsageError, match=r"another version \(observed: hello 7, facts 2; expected: hello 1, facts 2\)"):
        read_hello(path)
    path.write_bytes(changed(hello, facts={"version": 3}))
    with pytest.raises(UsageError, match="observed: hello 1, facts 3"):
        read_hello(path)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "holds no hello"),
        (b"{}", "holds no hello"),
        (b"\xff\xfe", "holds no hello"),
        (b"[" * 100_000, "holds no hello"),
        (b'{"version": 1, "facts": {"version": 2}}', "missing required field"),
        (b'{"version": "\x1b[2J"}', "holds no hello"),
        (b" " * (MAX_HELLO_BYTES + 1), "too large"),
    ],
)
def test_files_that_are_no_hello(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "hello.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=text) as caught:
        read_hello(path)
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 2


def test_a_wrong_value_is_named_by_its_field(tmp_path: Path, hello: Hello) -> None:
    path = tmp_path / "hello.json"
    path.write_bytes(changed(hello, role="referee"))
    with pytest.raises(UsageError, match="role"):
        read_hello(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, text in (("pipe", "is not a file"), (".", "is not a file"), ("absent", "No such file"), ("a\0b", "null")):
        with pytest.raises(UsageError, match=text):
            read_hello(tmp_path / name)


def test_the_command_writes_a_hello_that_can_be_read(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["facts", "-o", "json", "--role", "engine", "--socket-dir", str(tmp_path)])
    assert done.exit_code == 0
    path = tmp_path / "hello.json"
    path.write_text(done.stdout)
    hello = read_hello(path)
    assert (hello.role, hello.transports) == ("engine", SPOKEN)
    assert hello.facts.socket_dir is not None
    assert hello.facts.socket_dir.path == str(tmp_path)


def test_the_screen_shows_each_fact_with_its_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,,1\x1b[2J")
    done = CliRunner().invoke(app, ["facts", "--socket-dir", str(tmp_path)])
    assert done.exit_code == 0
    assert "pidfd_getfd(-1, 0, 0) = " in done.stdout
    assert "reading stops at ''" in done.stdout
    assert "\x1b[2J" not in done.stdout
    for fact in collect().syscalls.values():
        assert fact.evidence in done.stdout
    assert len(done.stdout.splitlines()) < 70


def test_wrong_use_exits_2() -> None:
    assert CliRunner().invoke(app, ["facts", "--role", "referee"]).exit_code == 2


def test_interfaces_are_those_of_the_kernel() -> None:
    found = {each.name: each for each in interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    loopback = found["lo"]
    assert (loopback.loopback, loopback.up, "127.0.0.1" in loopback.ipv4) == (True, True, True)
    assert loopback.mtu >= 1500
    assert not any(each.loopback for each in found.values() if each.name.startswith("eth"))


def test_limits_of_those_who_listen(tmp_path: Path) -> None:
    for name, text in (
        ("ipv4/ip_local_port_range", "1024\t65535\n"),
        ("core/somaxconn", "128\n"),
        ("ipv4/ip_unprivileged_port_start", "0\n"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = network(tmp_path)
    assert (found.ephemeral_low, found.ephemeral_high, found.somaxconn) == (1024, 65535, 128)
    assert found.unprivileged_port_start == 0
    unknown = network(tmp_path / "absent")
    assert (unknown.ephemeral_high, unknown.somaxconn, unknown.unprivileged_port_start) == (0, 0, 1024)


def test_a_route_names_interface_and_source() -> None:
    route = route_to("127.0.0.1")
    assert (route.interface, route.source) == ("lo", "127.0.0.1")
    assert route.evidence == "connect of a datagram socket to 127.0.0.1: from 127.0.0.1 on lo"
    for each in interfaces():
        for address in each.ipv4 if each.up and not each.loopback else ():
            assert route_to(address).interface == each.name


@pytest.mark.parametrize("address", ["localhost", "", "127.0.0.1:80", "300.1.1.1", "engine.svc"])
def test_a_name_is_no_address(address: str) -> None:
    """Resolving one may take any time."""
    with pytest.raises(UsageError, match="not an address"):
        route_to(address)


def test_lists_and_choices_of_the_kernel() -> None:
    assert numbers("0-2,5") == (0, 1, 2, 5)
    assert (numbers(""), numbers("0"), numbers("none")) == ((), (0,), ())
    assert chosen("always [madvise] never") == "madvise"
    assert chosen("") == ""


def test_memory_is_described() -> None:
    found = memory()
    assert found.available_bytes is not None
    assert 0 < found.available_bytes <= meminfo()["MemTotal"]
    assert found.budget_bytes is not None
    assert found.budget_bytes <= found.available_bytes
    assert set(found.numa_allowed) <= set(found.numa_nodes) or not found.numa_nodes
    descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    assert memory().nofile_open == found.nofile_open + 3
    for descriptor in descriptors:
        os.close(descriptor)
