"""Ray, as far as we use it: reach a cluster, place actors on nodes by name, ask an actor within a deadline.

Ray reads its secret from the environment when it is imported: see ``node.ray_environment``, and import this afterwards.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from syncstack.errors import DeadlineExceeded, EngineUnreachable, SyncstackError, UsageError
from syncstack.fleet.host import Host
from syncstack.fleet.node import LABEL
from syncstack.fleet.placement import Layout, NodeInfo, Placement, actor_name, choose, node_info
from syncstack.wire import tcp
from syncstack.wire.tcp import Address

log = logging.getLogger(__name__)

NAMESPACE = "syncstack"
POLL_S = 0.5
REACH_S = 10.0
"""How long a cluster's head may take to answer."""
PLACE_S = 60.0
"""How long Ray may take to reserve what its nodes have, and to start an actor there."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A driver of the cluster at HOST:PORT, for the length of the block. Raises EngineUnreachable."""
    with tcp.connect(Address.parse(f"tcp://{address}"), deadline=time.monotonic() + REACH_S):
        pass  # Ray would try for a quarter of an hour where nobody listens
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise EngineUnreachable(
            f"the cluster at {address} cannot be used from here",
            observed=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            next_step="run this inside one of its nodes, with the token that it was started with",
        ) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has put one of its own there, which ends the process at once
    try:
        yield
    finally:
        ray.shutdown()


def nodes() -> list[NodeInfo]:
    """The nodes that live, with the roles that no placement has reserved."""
    taken: set[tuple[str, str]] = set()
    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            for index, bundle in group["bundles"].items():
                taken |= {(group["bundles_to_node_id"].get(index, ""), role) for role in bundle}
    described: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    found = [
        node_info(node["Labels"], LABEL, {r for r in node["Resources"] if (node["NodeID"], r) not in taken})
        for node in described
        if node["Alive"]
    ]
    return [node for node in found if node is not None]


def await_placement(layout: Layout, engines: int, trainer: str | None, wait_s: float) -> Placement:
    """Choose nodes as soon as there are enough of them. Raises UsageError after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return choose(nodes(), layout, engines, trainer)
        except UsageError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_S)


class Placed:
    """What a placement reserves, and the actors on it: the trainer's first. One bundle for each, bound to its node by
    name, because an engine's address is its node's: when a node comes back, its actor is started there again."""

    def __init__(self, placement: Placement, layout: Layout, *, detached: bool) -> None:
        """Raises DeadlineExceeded or UsageError; nothing is reserved then."""
        names = [placement.trainer, *placement.engines]
        roles = ["trainer", *["engine"] * len(placement.engines)]
        lifetime = "detached" if detached else None
        self._group: PlacementGroup = placement_group(
            [{role: 1} for role in roles],
            strategy="PACK" if layout == "colocated" else "STRICT_SPREAD",
            lifetime=lifetime,
            bundle_label_selector=[{f"{LABEL}name": name} for name in names],
        )
        self.hosts: list[Any] = []
        try:
            if not self._group.wait(PLACE_S):
                raise DeadlineExceeded(f"the cluster did not reserve its nodes within {PLACE_S:g} s")
            for index, (role, name) in enumerate(zip(roles, names, strict=True)):
                self.hosts.append(_actor(self._group, index, role, actor_name(role, name), lifetime))
        except BaseException:
            self.close()
            raise

    @property
    def trainer(self) -> Any:
        """The trainer's host."""
        return self.hosts[0]

    @property
    def engines(self) -> Sequence[Any]:
        """The engines' hosts."""
        return self.hosts[1:]

    def leave(self) -> None:
        """End the trainer's actor; a detached placement's engines go on."""
        ray.kill(self.trainer)

    def close(self) -> None:
        """End the actors, and with them what they run; free the nodes."""
        for host in self.hosts:
            ray.kill(host)
        remove_placement_group(self._group)


def _actor(group: PlacementGroup, index: int, role: str, name: str, lifetime: str | None) -> Any:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    # A trainer that is gone is not to begin anew by itself; an engine's host is, with its node.
    options = {"max_restarts": -1 if role == "engine" else 0, "max_task_retries": 0, "num_cpus": 0}
    made = ray.remote(Host).options(
        name=name, lifetime=lifetime, scheduling_strategy=strategy, resources={role: 1}, **options
    )
    return made.remote()


def host_named(name: str) -> Any:
    """The actor that ``Placed`` gave this name. Raises UsageError."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        raise UsageError(f"the cluster has no actor {name}", next_step="start this by syncstack launch") from None


def ask(host: Any, call: str, *args: Any, wait_s: float, **options: Any) -> Any:
    """Call a host's method. Raises DeadlineExceeded, EngineUnreachable where the actor or its node is gone or on its
    way back, and what the method raises."""
    reference = getattr(host, call).remote(*args, **options)
    try:
        return ray.get(reference, timeout=wait_s)
    except GetTimeoutError:
        ray.cancel(reference)
        raise DeadlineExceeded(f"an actor did not answer {call} within {wait_s:g} s") from None
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, SyncstackError) else error) from None
    except RayActorError as error:
        raise EngineUnreachable("the actor is not there", observed=" ".join(str(error).split())[:300]) from None


def kill_host(host: Any) -> None:
    """End an actor that does not answer, and what it runs; it is started again."""
    ray.kill(host, no_restart=False)
