"""Which transport serves a link, and why not a better one. Pure: hellos in, choice out; no GPU, no torch, no I/O.

Both sides' hellos go in, so every rank that has them comes to the same answer. A transport is what it needs
(``NEEDS``); choosing is the first one whose needs are met, in the order that the policy gives.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from syncstack.errors import PlanError
from syncstack.facts import Hello
from syncstack.plan import descriptors, gpu, needs
from syncstack.plan.model import Choice, Need, Policy, Unmet
from syncstack.plan.rates import expected

Pair = tuple[Hello, Hello]
"""Sender and receiver of one link."""

_ON_GPU = (
    Need("a GPU on both sides", gpu.gpus, hardware=True),
    Need("weights in GPU memory", gpu.weights_on_gpu, hardware=True),
    Need("one host", needs.same_host, hardware=True),
    Need("GPUs that reach each other", gpu.device_reached, hardware=True),
)
_GPU_OPEN = (
    Need("no sandbox", gpu.no_sandbox),
    Need("one view of the GPUs", gpu.device_seen),
    Need("a GPU for more than one process", gpu.open_to_two),
)
_HANDED_OVER = Need("a way for descriptors", descriptors.no_way)

# Hardware first and the build next: nobody wants advice about a limit that stands before a path that does not exist.
NEEDS: dict[str, tuple[Need, ...]] = {
    "cuda_fd": (
        *_ON_GPU,
        Need("memory that can be handed over", gpu.shareable, hardware=True),
        Need("this build", needs.in_build("cuda_fd")),
        *_GPU_OPEN,
        _HANDED_OVER,
        Need("enough descriptors", gpu.descriptors),
    ),
    "cuda_ipc": (
        *_ON_GPU,
        Need("this build", needs.in_build("cuda_ipc")),
        *_GPU_OPEN,
        Need("plain GPU memory", gpu.plain_memory),
        Need("one PID namespace", gpu.one_pid_namespace),
    ),
    "host_fd": (
        Need("one host", needs.same_host, hardware=True),
        Need("this build", needs.in_build("host_fd")),
        _HANDED_OVER,
        Need("a memfd", needs.memfd),
    ),
    "collective": (
        Need("this build", needs.in_build("collective")),
        Need("a network", needs.network),
        Need("a link over TCP", needs.link_by_tcp),
    ),
    "stream": (Need("this build", needs.in_build("stream")), Need("a network", needs.network)),
    "disk": (Need("this build", needs.in_build("disk")), Need("a shared folder", needs.common_folder)),
}
"""What each transport needs, in the order in which a lack of it is told."""

_BY_DESCRIPTOR = frozenset(name for name, wanted in NEEDS.items() if _HANDED_OVER in wanted)


_ALONE = Unmet(
    need="more than one worker",
    reason="it is for several workers: one gets the same bytes by stream, over the link that is open already",
    hardware=True,
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One transport of a policy: everything that it lacks on a link; nothing if it is usable."""

    transport: str
    unmet: tuple[Unmet, ...] = ()

    @property
    def admitted(self) -> bool:
        """Whether the hardware admits it, usable or not."""
        return not any(each.hardware for each in self.unmet)


def explain(sender: Hello, receiver: Hello, policy: Policy, *, alone: bool = True) -> tuple[Row, ...]:
    """Every transport of the policy, in its order, with everything that it lacks on this link. ``alone``: it is the
    only one of its refit."""
    refused = {each.transport: each.cause for each in policy.excluded}
    rows = []
    for name in policy.transports:
        lacks = descriptors.unmet(NEEDS[name], sender, receiver)
        if any(lack.need == _HANDED_OVER.name for lack in lacks):
            lacks = (*lacks, *descriptors.more_gates(sender, receiver))
        if name in refused:
            lacks = (*lacks, Unmet(need="a trial that passes", reason=f"a trial refused it: {refused[name]}"))
        if name == "collective" and alone and len(policy.transports) > 1:
            lacks = (*lacks, _ALONE)
        rows.append(Row(transport=name, unmet=lacks))
    return tuple(rows)


def choose(sender: Hello, receiver: Hello, policy: Policy | None = None) -> Choice:
    """The best transport that both sides can really use.

    Raises PlanError, with a reason for each transport, when none is left, or when ``strict`` forbids the one that is.
    """
    return choose_common({"": (sender, receiver)}, policy)[""]


def choose_common(links: Mapping[str, Pair], policy: Policy | None = None) -> dict[str, Choice]:
    """The best transport that every link can use: all links of a refit take one. By link name, as ``links``.

    The order of the links makes no difference. Raises PlanError as ``choose`` does; its text names the links.
    """
    policy = policy or Policy()
    plans = {name: explain(*links[name], policy, alone=len(links) == 1) for name in sorted(links)}
    rejected: list[dict[str, str]] = []
    best = ""
    for index, transport in enumerate(policy.transports):
        rows = {name: plan[index] for name, plan in plans.items()}
        if all(not row.unmet for row in rows.values()):
            if policy.strict and best:
                raise _forbidden(best, transport, rejected[policy.transports.index(best)])
            return {name: _choice(transport, links[name], policy, rejected, name) for name in links}
        rejected.append(_reasons(rows))
        if not best and all(row.admitted for row in rows.values()):
            best = transport
    raise _none(policy, rejected)


def _reasons(rows: Mapping[str, Row]) -> dict[str, str]:
    """Why each link does not take this transport: its own reason, else that another link cannot."""
    lacking = {name: row.unmet[0].reason for name, row in rows.items() if row.unmet}
    first, reason = next(iter(lacking.items()))
    return {name: lacking.get(name, f"{first} cannot take it: {reason}") for name in rows}


def _choice(transport: str, pair: Pair, policy: Policy, rejected: list[dict[str, str]], name: str) -> Choice:
    rate, basis = expected(transport, *pair)
    return Choice(
        transport=transport,
        fd=descriptors.way(*pair) if transport in _BY_DESCRIPTOR else "",
        expected_bytes_per_s=rate,
        basis=basis,
        why_not={other: reasons[name] for other, reasons in zip(policy.transports, rejected, strict=False)},
    )


def _told(reasons: Mapping[str, str]) -> str:
    """The reasons of all links, each once, with the link's name where it has one."""
    texts: dict[str, str] = {}
    for name, reason in reasons.items():
        if " cannot take it: " not in reason:
            texts.setdefault(reason, name)
    return "; ".join(f"{name}: {reason}" if name else reason for reason, name in texts.items())


def _forbidden(best: str, fallback: str, reasons: Mapping[str, str]) -> PlanError:
    return PlanError(
        f"the best transport that this hardware admits, {best}, cannot be used: {_told(reasons)}",
        consequence=f"Strict mode forbids the next one, {fallback}",
        next_step=f"remove what stands before {best}; or set SYNCSTACK_TRANSPORT={fallback}, or SYNCSTACK_STRICT=false",
    )


def _none(policy: Policy, rejected: list[dict[str, str]]) -> PlanError:
    every = zip(policy.transports, rejected, strict=True)
    return PlanError(
        "no transport can serve this link: " + "; ".join(f"{name}: {_told(reasons)}" for name, reasons in every),
        next_step="run `syncstack doctor` on both sides",
    )
