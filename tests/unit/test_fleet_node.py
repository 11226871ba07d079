"""What a container runs to become a node, and what it refuses."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from syncstack.errors import EngineUnreachable, SettingsError, UsageError
from syncstack.fleet import cli, join
from syncstack.fleet.host import Host, engine_address
from syncstack.fleet.node import ENVIRONMENT, Node, own_environment, ray_command, ray_environment, ray_ports
from syncstack.settings import Settings
from syncstack.wire.auth import Token
from syncstack.wire.ports import Band
from syncstack.wire.tcp import Address

SECRET = "0123456789abcdef" * 2


def made(**options: object) -> Node:
    given = {"name": "n", "roles": ("engine",), "address": "192.0.2.7", "head": Address("192.0.2.1", 20999)}
    whole = {**given, "is_head": False, "boot_id": "b", "pid": 17, **options}
    return Node(**whole)  # type: ignore[arg-type]


def band(size: int = 40) -> Band:
    with socket.create_server(("0.0.0.0", 0)) as sock:
        low = min(sock.getsockname()[1], 65535 - size)
    return Band("ray", low, low + size)


def options_of(command: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)


def test_every_port_is_of_the_band_and_none_is_given_twice() -> None:
    found = band()
    ports = ray_ports(found, made())
    assert all(found.low <= port <= found.high for port in ports.values())
    workers = set(range(ports.pop("min-worker-port"), ports.pop("max-worker-port") + 1))
    assert len({*ports.values()} | workers) == len(ports) + len(workers)


def test_a_head_port_that_is_taken_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        head = Address("127.0.0.1", sock.getsockname()[1])
        with pytest.raises(SettingsError, match=rf"port {head.port} is taken .*{os.getpid()}"):
            ray_ports(band(), made(is_head=True, head=head))


def test_a_node_offers_its_roles_and_no_processor() -> None:
    command = ray_command(made(roles=("trainer", "driver")), {"node-manager-port": 5})
    options = options_of(command)
    assert json.loads(options["resources"]) == {"trainer": 1, "driver": 1}
    assert options["labels"] == "syncstack.io/name=n,syncstack.io/host=b"
    assert (options["num-cpus"], options["address"], options["node-manager-port"]) == ("0", "192.0.2.1:20999", "5")
    assert "--disable-usage-stats" in command
    assert "--head" not in command


@pytest.mark.parametrize("dashboard", [False, True])
def test_a_head_has_its_dashboard_off_unless_asked_and_then_on_loopback(dashboard: bool) -> None:
    command = ray_command(made(is_head=True, dashboard=dashboard), {"port": 20999, "dashboard-port": 7})
    options = options_of(command)
    assert options["include-dashboard"] == str(dashboard).lower()
    assert ("dashboard-host" in options, "dashboard-port" in options) == (dashboard, dashboard)
    assert options.get("dashboard-host", "127.0.0.1") == "127.0.0.1"
    assert {"--head", "--no-monitor"} <= set(command)
    assert "address" not in options


def test_ray_gets_a_secret_that_is_neither_the_token_nor_another_of_its_keys() -> None:
    token = Token(SECRET.encode())
    environment = ray_environment(token.cluster_secret)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN"] == token.cluster_secret
    assert SECRET not in environment["RAY_AUTH_TOKEN"]
    assert environment["RAY_AUTH_TOKEN"] not in token.authorization
    assert Token(SECRET.encode()).cluster_secret == token.cluster_secret
    assert Token(b"another" * 4).cluster_secret != token.cluster_secret


def test_what_a_user_has_set_for_ray_stays_but_for_the_secret() -> None:
    given = {"RAY_ROTATION_BACKUP_COUNT": "9", "RAY_AUTH_TOKEN": "x", "HOME": "/"}
    found = ray_environment("s", given)
    assert found == {**ENVIRONMENT, "RAY_ROTATION_BACKUP_COUNT": "9", "RAY_AUTH_TOKEN": "s"}


def test_an_engine_gets_the_environment_of_its_node_without_rays() -> None:
    assert own_environment(b"A=1\0RAY_AUTH_TOKEN=s\0B=x=y\0EMPTY=\0\0") == {"A": "1", "B": "x=y", "EMPTY": ""}


def test_a_node_needs_a_token() -> None:
    with pytest.raises(SettingsError, match="a Ray node needs a token"):
        join.prepare(Settings.load(), ("engine",), Address("127.0.0.1", 1), {})


def test_a_cluster_that_is_not_there_is_said_in_time() -> None:
    settings = Settings.load(token=SECRET, engine_ready_s=0.2)
    with pytest.raises(EngineUnreachable, match=r"no cluster at 127.0.0.1:1 .*within 0.2 s"):
        join.prepare(settings, ("engine",), Address("127.0.0.1", 1), {})


def test_a_head_that_nobody_could_reach_is_refused() -> None:
    settings = Settings.load(token=SECRET)
    with pytest.raises(SettingsError, match="cannot be reached at 0.0.0.0:20999"):
        join.prepare(settings, ("driver",), Address("0.0.0.0", 20999), {}, is_head=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"role": ["engine", "cook"], "head": "127.0.0.1:9"}, "no such role: cook"),
        ({"role": ["engine"]}, "which cluster"),
        ({"role": ["engine"], "join": "127.0.0.1:0"}, "which cluster"),
        ({"role": ["engine"], "join": "127.0.0.1"}, "cannot be used"),
    ],
)
def test_bad_input_to_a_node(options: dict[str, object], said: str) -> None:
    with pytest.raises((UsageError, SettingsError), match=said):
        cli.node(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("unix", "unix:/run/x/engine-3"),
        ("tcp://10.0.0.1:7000", "tcp://10.0.0.1:7000"),
        ("unix,tcp://[2001:db8::7]:7000", "tcp://[2001:db8::7]:7000"),
    ],
)
def test_c18_where_an_engine_is_reached_is_said_by_its_node_and_not_by_ray(listen: str, address: str) -> None:
    settings = Settings.load(listen=listen, engine_name="engine-3", socket_dir=Path("/run/x"))
    assert engine_address(settings) == address


@pytest.mark.parametrize("listen", ["tcp://10.0.0.1:auto", "tcp://0.0.0.0:7000", "tcp://10.0.0.1:0", "tcp://[::]:70"])
def test_an_address_that_nobody_elsewhere_can_know_is_refused(listen: str) -> None:
    with pytest.raises(UsageError, match="nobody elsewhere can know"):
        engine_address(Settings.load(listen=listen))


def test_a_node_without_a_url_for_its_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="SYNCSTACK_ENGINE_URL"):
        Host().about()
    monkeypatch.setenv("SYNCSTACK_ENGINE_URL", "http://x:1")
    assert json.loads(Host().about())["url"] == "http://x:1"


def test_a_host_gives_back_what_its_command_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCSTACK_NODE_PID", str(os.getpid()))
    host = Host()
    assert host.ended() == "it was never started"
    host.start(["sh", "-c", "echo $X; exit 5"], {"X": "seen"}, keep_output=True)
    while not host.ended():
        pass
    assert (host.status(), host.read(0), host.read(5)) == (5, b"seen\n", b"")
    host.kill()
