"""Which nodes a trainer and its engines are placed on. Pure: no Ray, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from syncstack.errors import UsageError
from syncstack.fleet.node import ROLES

Layout = Literal["colocated", "disagg"]


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is there: its name, the machine under it, and the roles that nobody has taken yet."""

    name: str
    host: str
    free: frozenset[str]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the nodes."""

    trainer: str
    engines: tuple[str, ...]


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer's process is told of its fleet, in SYNCSTACK_FLEET."""

    cluster: str
    engines: tuple[str, ...]
    """Names of the actors that hold them."""
    command: tuple[str, ...]
    """What each of them runs."""
    stay: bool = False
    """Whether the engines go on serving when the trainer has ended."""


def actor_name(role: str, node: str) -> str:
    """Of the actor that holds a node's process."""
    return f"{role}:{node}"


def choose(nodes: Sequence[NodeInfo], layout: Layout, engines: int, trainer: str | None = None) -> Placement:
    """``trainer``: the node that the trainer shall be on, if it is to be that one.

    Colocated: a trainer and its engines on one machine, in one container or several. Disagg: each in a container of
    its own, wherever. The same answer for the same nodes in any order. Raises UsageError, which says what is missing.
    """
    names = [node.name for node in nodes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            "two nodes have one name", observed=", ".join(twice), next_step="give each its own: syncstack node --name"
        )
    ordered = sorted(nodes, key=lambda node: node.name)
    for place in ordered:
        if "trainer" not in place.free or trainer not in (None, place.name):
            continue
        able = [node.name for node in ordered if "engine" in node.free and _fits(node, place, layout)]
        if len(able) >= engines:
            return Placement(trainer=place.name, engines=tuple(able[:engines]))
    raise UsageError(
        f"the cluster has no place for a trainer and {engines} engines, {layout}",
        observed="; ".join(f"{node.name}: {', '.join(sorted(node.free)) or 'taken'}" for node in ordered) or "no node",
        expected="a node with the role trainer, and one with the role engine for each engine"
        + (", all on one machine" if layout == "colocated" else ", each of them another"),
        consequence="Nothing was placed",
        next_step="start what is missing: syncstack node --role ROLE --join HOST:PORT",
    )


def _fits(node: NodeInfo, trainer: NodeInfo, layout: Layout) -> bool:
    return bool(node.host) and node.host == trainer.host if layout == "colocated" else node.name != trainer.name


def node_info(labels: Mapping[str, str], prefix: str, free: Iterable[str]) -> NodeInfo | None:
    """A node by its labels and the resources that are free there; None for one that is not ours."""
    name = labels.get(prefix + "name")
    if name is None:
        return None
    roles = frozenset(free) & frozenset(ROLES)
    return NodeInfo(name=name, host=labels.get(prefix + "host", ""), free=roles)
