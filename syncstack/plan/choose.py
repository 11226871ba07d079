"""Which transport serves a link, and why not a better one. Pure: facts in, choice out; no GPU, no torch, no I/O.

Both sides' facts go in, so every rank that has them comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from syncstack.errors import PlanError, SettingsError
from syncstack.facts import Facts

BEST_FIRST = ("cuda_fd", "cuda_ipc", "host_fd", "collective", "stream", "disk")
"""Every transport of the design, best first. Those not in this release are ruled out by saying so."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A transport, and for each better one the fact that ruled it out, in the user's words."""

    transport: str
    why_not: dict[str, str]

    def line(self, link: str) -> str:
        """The one line that is printed for a link."""
        rejected = "; ".join(f"not {name}: {reason}" for name, reason in self.why_not.items())
        return f"{link}: {self.transport}" + (f" ({rejected})" if rejected else "")


def choose(sender: Facts, receiver: Facts, *, policy: str = "auto", socket_reachable: bool = True) -> Choice:
    """The best transport that both sides can really use.

    ``policy`` is ``auto``, or transport names in order of preference, separated by commas. ``socket_reachable`` says
    whether the sender can connect to a unix socket of the receiver: that was tried, not inferred.

    Raises SettingsError for an unknown name and PlanError, with a reason for each, when none is left.
    """
    candidates = _candidates(policy)
    why_not: dict[str, str] = {}
    for name in candidates:
        reason = _RULES[name](sender, receiver, socket_reachable)
        if reason is None:
            return Choice(transport=name, why_not=why_not)
        why_not[name] = reason
    raise PlanError(
        "no transport can serve this link: " + "; ".join(f"{name}: {reason}" for name, reason in why_not.items()),
        next_step="run `syncstack doctor` on both sides",
    )


def _candidates(policy: str) -> tuple[str, ...]:
    if policy == "auto":
        return BEST_FIRST
    names = tuple(name.strip() for name in policy.split(",") if name.strip())
    unknown = [name for name in names if name not in BEST_FIRST]
    if unknown or not names:
        raise SettingsError(
            "the transport setting names no known transport",
            observed=repr(policy),
            expected="auto, or some of " + ",".join(BEST_FIRST),
            next_step="set SYNCSTACK_TRANSPORT=auto",
        )
    return names


def _no_gpu(sender: Facts, receiver: Facts, _: bool) -> str | None:
    missing = [side for side, facts in (("trainer", sender), ("engine", receiver)) if facts.gpu.count == 0]
    if missing:
        evidence = (sender if "trainer" in missing else receiver).gpu.evidence
        return f"no GPU in the {' and the '.join(missing)} ({evidence})"
    return "not in this release"


def _host_fd(sender: Facts, receiver: Facts, socket_reachable: bool) -> str | None:
    if sender.boot_id != receiver.boot_id:
        return "trainer and engine run on different hosts (boot ids differ)"
    if not socket_reachable:
        return "the trainer cannot connect to the engine's unix socket: they share no folder"
    memfd = sender.syscalls["memfd_create"]
    if memfd.verdict != "ok":
        return f"the trainer cannot make a memfd ({memfd.evidence})"
    return None


def _not_yet(_sender: Facts, _receiver: Facts, _reachable: bool) -> str | None:
    return "not in this release"


_RULES: dict[str, Callable[[Facts, Facts, bool], str | None]] = {
    "cuda_fd": _no_gpu,
    "cuda_ipc": _no_gpu,
    "host_fd": _host_fd,
    "collective": _not_yet,
    "stream": _not_yet,
    "disk": _not_yet,
}
