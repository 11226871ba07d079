"""What makes a container a node of a Ray cluster: the command line and the environment of ``ray start``.

Ray carries who runs where, and nothing of a refit: no weights, no versions. Whoever has the cluster's secret may run
code on its nodes, which is what Ray is for; so a node is never started without one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

import msgspec

from syncstack.errors import SettingsError
from syncstack.facts.listeners import listeners
from syncstack.wire.ports import Band, take
from syncstack.wire.tcp import Address, listen_if_free

Role = Literal["trainer", "engine", "driver"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

LABEL: Final = "syncstack.io/"
"""Before the names of a node's labels: ``name``, and ``host``, the boot id of the machine under the container."""

WORKERS: Final = 16
"""Ports for actors and drivers of one node; each takes one."""

STORE_BYTES: Final = 80_000_000
"""Of the object store, which holds nothing of ours. Ray takes no less."""

OPTIONS: Final = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
)

ENVIRONMENT: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray empties CUDA_VISIBLE_DEVICES of an actor that asks for no GPU. A container's devices are its own to use.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # An actor's end would kill its children, and not theirs: `tether.py` sees to all of them.
    "RAY_kill_child_processes_on_worker_exit": "false",
    # Ray's own killer would take the actor that holds an engine whenever that engine fills the machine, as it should.
    "RAY_memory_monitor_refresh_ms": "0",
    # Its logs lie in memory where the root is read-only.
    "RAY_ROTATION_MAX_BYTES": str(4 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node. ``head``: where the cluster is reached; this node's own address there, or another node's."""

    name: str
    roles: tuple[Role, ...]
    address: str
    """An IP literal by which the other nodes reach this one."""
    head: Address
    is_head: bool
    boot_id: str
    pid: int
    """The process that becomes ``ray start``."""
    dashboard: bool = False


def ray_ports(band: Band, node: Node) -> dict[str, int]:
    """Ports for this node, from the band. Ray takes no sockets, only numbers: they are free when this returns, and the
    band and its cursor are what keeps others away until Ray listens. Raises SettingsError."""
    sockets = take(band, "0.0.0.0", len(OPTIONS) + 1 + WORKERS)  # noqa: S104 - for a moment; Ray does so for good
    try:
        ports = [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
    found = dict(zip([*OPTIONS, "dashboard-port"], ports, strict=False))
    found |= {"min-worker-port": ports[-WORKERS], "max-worker-port": ports[-1]}
    if node.is_head:
        found["port"] = _head_port(node.head)
    return found


def _head_port(head: Address) -> int:
    sock = listen_if_free(Address(head.host, head.port))
    if sock is None:
        raise SettingsError(
            f"the cluster's port {head.port} is taken",
            observed=str(listeners(head.port, head.port).get(head.port, "somebody listens")),
            consequence="No node was started",
            next_step="choose another port in --head, or join that cluster with --join",
        )
    sock.close()
    return head.port


def ray_command(node: Node, ports: Mapping[str, int]) -> list[str]:
    """The command line of ``ray start``, which stays in the foreground. No processor is offered: Ray would start a
    process for each, and what runs here is placed by role."""
    folder = tempfile.gettempdir()
    labels = {"name": node.name, "host": node.boot_id}
    options = {
        "node-ip-address": node.address,
        "node-name": node.name,
        "num-cpus": "0",
        "num-gpus": "0",
        "resources": json.dumps(dict.fromkeys(node.roles, 1)),
        "labels": ",".join(f"{LABEL}{key}={value}" for key, value in labels.items() if value),
        "object-store-memory": str(STORE_BYTES),
        "plasma-directory": folder,  # Docker gives /dev/shm 64 MiB
        # Of its own: two nodes that start at once in one folder choose the same names for their sockets. Short, too.
        "temp-dir": f"{folder}/ray-{node.pid}",
        "include-log-monitor": "false",
        **{name: str(port) for name, port in ports.items() if name != "dashboard-port"},
    }
    if node.is_head:
        options["include-dashboard"] = str(node.dashboard).lower()
        if node.dashboard:
            options |= {"dashboard-host": "127.0.0.1", "dashboard-port": str(ports["dashboard-port"])}
    else:
        options["address"] = node.head.netloc
    flags = ["--block", "--disable-usage-stats", *(["--head", "--no-monitor"] if node.is_head else [])]
    written = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, *written]


def ray_environment(secret: str, given: Mapping[str, str] = {}) -> dict[str, str]:
    """What every process of a node and every driver needs in its environment; what was ``given`` stays."""
    return {name: given.get(name, value) for name, value in ENVIRONMENT.items()} | {"RAY_AUTH_TOKEN": secret}


def own_environment(raw: bytes) -> dict[str, str]:
    """The environment that a node was started with, from its /proc/PID/environ, without what is Ray's: an engine that
    is started by an actor shall run as it would without one."""
    pairs: Sequence[tuple[str, str, str]] = [
        entry.decode(errors="surrogateescape").partition("=") for entry in raw.split(b"\0") if entry
    ]
    return {name: value for name, _, value in pairs if not name.startswith("RAY_")}
