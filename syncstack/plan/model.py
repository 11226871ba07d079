"""What goes into a plan beside the two hellos, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from syncstack.errors import SettingsError
from syncstack.facts import Hello

BEST_FIRST = ("cuda_fd", "cuda_ipc", "host_fd", "collective", "stream", "disk")
"""Every transport of the design, best first. Which of them a build speaks, its hello says."""

FdWay = Literal["", "scm", "pidfd"]
"""How descriptors travel: not at all, with a message over a unix socket, or fetched with pidfd_getfd."""


class Need(msgspec.Struct, frozen=True):
    """One requirement of a transport.

    ``find(sender, receiver)`` is None where it is met, else the reason in the user's words: which side, what was
    seen, what to change. ``hardware``: no setting can meet it, so lacking it is no fallback (see Policy.strict).
    """

    name: str
    find: Callable[[Hello, Hello], str | None]
    hardware: bool = False


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A transport that the plan admitted and a trial did not, and what the trial met."""

    transport: str
    cause: str


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the user wants, and what trials have ruled out.

    ``transports`` are tried in this order. ``strict``: the first of them that the hardware of both sides admits must
    be usable, else PlanError; what both processes can see decides what the hardware admits, so a pair without GPUs
    is not refused for lacking one, while a pair with GPUs is refused where a filter, a limit, or the build stands
    before the best path. ``distinct_gpus``: no two workers may hold one GPU.
    """

    transports: tuple[str, ...] = BEST_FIRST
    strict: bool = False
    excluded: tuple[Refused, ...] = ()
    distinct_gpus: bool = True

    @classmethod
    def of(cls, transport: str = "auto", *, strict: bool = False, distinct_gpus: bool = True) -> Policy:
        """The policy of the settings: ``auto``, or names in order of preference, separated by commas.

        Raises SettingsError for a name that is not known.
        """
        return cls(transports=_names(transport), strict=strict, distinct_gpus=distinct_gpus)


class Unmet(msgspec.Struct, frozen=True, kw_only=True):
    """A need that a link does not meet."""

    need: str
    reason: str
    hardware: bool = False


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A transport, and for each better one what ruled it out, in the user's words.

    ``expected_bytes_per_s`` is what the path should reach, None where nobody measured such a pair; ``basis`` says
    what it rests on.
    """

    transport: str
    fd: FdWay = ""
    expected_bytes_per_s: float | None = None
    basis: str = ""
    why_not: dict[str, str] = {}

    def line(self, link: str) -> str:
        """The one line that is printed for a link."""
        way = " by pidfd_getfd" if self.fd == "pidfd" else ""
        rejected = "; ".join(f"not {name}: {reason}" for name, reason in self.why_not.items())
        return f"{link}: {self.transport}{way}" + (f" ({rejected})" if rejected else "")


def _names(text: str) -> tuple[str, ...]:
    if text.strip() == "auto":
        return BEST_FIRST
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or any(name not in BEST_FIRST for name in names):
        raise SettingsError(
            "the transport setting names no known transport",
            observed=repr(text),
            expected="auto, or some of " + ",".join(BEST_FIRST),
            next_step="set SYNCSTACK_TRANSPORT=auto",
        )
    return names
