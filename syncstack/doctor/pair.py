"""A trainer and one worker of an engine: what they share, and whether a refit will work between them."""

from __future__ import annotations

from typing import Final

import msgspec

from syncstack.doctor.checks.memory import MORE_MEMORY, shown
from syncstack.doctor.model import Check, Finding, Remedy, broken, holds, skip
from syncstack.doctor.report import Shared
from syncstack.errors import PlanError
from syncstack.facts import Hello
from syncstack.plan import Choice, Policy, choose


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One link. ``weights_bytes`` is what the engine's model takes, as the engine says."""

    link: str
    trainer: Hello
    engine: Hello
    policy: Policy
    weights_bytes: int


def shared(pair: Pair) -> Shared:
    """Return what the two processes have in common, by boot id, inodes and ids."""
    ours, theirs = pair.trainer.facts, pair.engine.facts
    host = bool(ours.boot_id) and ours.boot_id == theirs.boot_id

    def namespace(kind: str) -> bool:
        mine = ours.namespaces.get(kind, "")
        return host and bool(mine) and mine == theirs.namespaces.get(kind, "")

    mine, its = ours.socket_dir, theirs.socket_dir
    folder = (
        mine is not None and its is not None and mine.inode and (mine.device, mine.inode) == (its.device, its.inode)
    )
    return Shared(
        host=host,
        user=ours.uid == theirs.uid,
        folder=host and bool(folder),
        pid=namespace("pid"),
        ipc=namespace("ipc"),
        net=namespace("net"),
        userns=namespace("user"),
    )


def plan(pair: Pair) -> Choice | PlanError:
    """Return the plan's choice for the link, or why there is none."""
    try:
        return choose(pair.trainer, pair.engine, pair.policy)
    except PlanError as error:
        return error


def choice_line(pair: Pair) -> str:
    """Return the line that a refit prints for the link."""
    found = plan(pair)
    return f"{pair.link}: none" if isinstance(found, PlanError) else found.line(pair.link)


def _transport(pair: Pair) -> Finding:
    found = plan(pair)
    if isinstance(found, Choice):
        return holds(f"{found.transport}{f' ({found.fd})' if found.fd else ''}")
    return broken(
        found.what,
        found.consequence or "No weights can be moved between these two",
        Remedy(
            other="one folder in both is enough on one host" if shared(pair).host else "a network between both",
            compose='volumes: ["sockets:/run/syncstack"] and user: "10001:10001" in both services',
            kubernetes="one emptyDir: {medium: Memory} at /run/syncstack and one runAsUser in both containers",
        ),
    )


def _release(pair: Pair) -> Finding:
    ours, theirs = pair.trainer.package, pair.engine.package
    if ours == theirs:
        return holds(f"both {ours}")
    return broken(
        f"{ours} here, {theirs} there",
        "One side may refuse what the other sends",
        Remedy(
            other="images of one release", compose="one tag in both image: lines", kubernetes="one tag in both images"
        ),
    )


def _memory(pair: Pair) -> Finding:
    found = plan(pair)
    if isinstance(found, PlanError) or found.transport != "host_fd":
        return skip("no version of the weights lies in the host's memory on this path")
    budget = pair.trainer.facts.memory.budget_bytes
    if budget is None:
        return skip("neither free memory nor a limit could be read")
    observed = f"weights of {shown(pair.weights_bytes)}; {shown(budget)} may still be taken"
    if budget >= pair.weights_bytes:
        return holds(observed)
    return broken(
        observed,
        "The trainer writes one copy of the weights into a memfd, which counts as its own memory",
        MORE_MEMORY,
    )


PAIR_CHECKS: Final[tuple[Check[Pair], ...]] = (
    Check(id="peer.transport", assertion="a transport serves the link", severity="fail", find=_transport),
    Check(id="peer.release", assertion="both sides run one release", severity="warn", find=_release),
    Check(id="peer.memory", assertion="one copy of the weights fits here", severity="warn", find=_memory),
)
