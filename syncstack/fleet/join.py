"""Become a node of a cluster, or start one beside this process."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from syncstack.errors import DeadlineExceeded, EngineUnreachable, SettingsError
from syncstack.facts.network import network
from syncstack.facts.process import boot_id
from syncstack.fleet.node import Node, Role, ray_command, ray_environment, ray_ports
from syncstack.fleet.process import GroupProcess
from syncstack.settings import Settings
from syncstack.wire import tcp
from syncstack.wire.ports import check, parse
from syncstack.wire.tcp import Address

log = logging.getLogger(__name__)

START_S = 60.0
"""How long Ray may take to start on a machine that is busy."""

POLL_S = 0.1


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A node that can be started: its command, its environment, and where it listens once it is there."""

    node: Node
    command: list[str]
    environment: dict[str, str]
    listens: Address


def prepare(
    settings: Settings,
    roles: tuple[Role, ...],
    cluster: Address,
    environ: Mapping[str, str],
    *,
    is_head: bool = False,
    name: str | None = None,
    dashboard: bool = False,
) -> Prepared:
    """Choose address and ports. Waits ``settings.engine_ready_s`` for the head. Raises SettingsError or
    EngineUnreachable."""
    secret = settings.required_token("a Ray node").cluster_secret
    bands = parse(settings.port_bands)
    check(bands, network())
    node = Node(
        name=name or settings.engine_name,
        roles=roles,
        address=_own_address(cluster) if is_head else _address_towards(cluster, settings.engine_ready_s),
        head=cluster,
        is_head=is_head,
        boot_id=boot_id(),
        pid=os.getpid(),
        dashboard=dashboard,
    )
    ports = ray_ports(bands["ray"], node)
    return Prepared(
        node=node,
        command=ray_command(node, ports),
        environment={**environ, **ray_environment(secret, environ), "SYNCSTACK_NODE_PID": str(node.pid)},
        listens=Address(node.address, ports["node-manager-port"]),
    )


@contextmanager
def beside(prepared: Prepared) -> Iterator[None]:
    """A node that lives as long as the block, and no longer than this process. Raises DeadlineExceeded or
    EngineUnreachable, with its last words."""
    with tempfile.TemporaryDirectory(prefix="syncstack-") as folder:
        output = Path(folder) / "node.log"
        process = GroupProcess("node", argv=prepared.command, env=prepared.environment, log=output)
        process.start()
        try:
            _await(process, prepared.listens, output)
            yield
        finally:
            process.kill()


def _await(process: GroupProcess, listens: Address, output: Path) -> None:
    deadline = time.monotonic() + START_S
    while not process.ended():
        try:
            tcp.connect(listens, deadline=time.monotonic() + POLL_S).close()
            return
        except EngineUnreachable:
            if time.monotonic() >= deadline:
                break
        time.sleep(POLL_S)
    said = " ".join(output.read_text(errors="replace").split()[-60:])
    if process.ended():
        raise EngineUnreachable(f"this node did not start: {process.ended()}", observed=said)
    raise DeadlineExceeded(f"this node did not start within {START_S:g} s", observed=said)


def _own_address(head: Address) -> str:
    """The one address of this machine that a name means."""
    sock: Any = tcp.listen_if_free(Address(head.host, 0))
    with sock:
        address = str(sock.getsockname()[0])
    if address in ("0.0.0.0", "::"):  # noqa: S104 - it is refused
        raise SettingsError(
            f"a cluster cannot be reached at {head.netloc}",
            expected="an address of this machine, by which the other nodes reach it",
            consequence="No node was started",
            next_step="name it in --head",
        )
    return address


def _address_towards(head: Address, wait_s: float) -> str:
    """This machine's address on the way to the head, which may come up later. Raises EngineUnreachable."""
    try:
        with tcp.connect(head, deadline=time.monotonic() + wait_s) as sock:
            return str(sock.getsockname()[0])
    except EngineUnreachable as error:
        raise EngineUnreachable(
            f"there is no cluster at {head.netloc}",
            observed=error.observed,
            expected=f"its head within {wait_s:g} s (SYNCSTACK_ENGINE_READY_S)",
            consequence="No node was started",
            next_step="start it: syncstack node --head HOST:PORT --role driver",
        ) from None
