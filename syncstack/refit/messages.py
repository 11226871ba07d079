"""What is said on an engine's control endpoint: JSON bodies of these types, over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syncstack import errors
from syncstack.errors import EngineError, SyncstackError
from syncstack.facts import Hello
from syncstack.refit.state import StateReport
from syncstack.settings import PauseMode
from syncstack.weights.meta import ParamMeta

MAX_BODY_BYTES = 64 << 20

Session = Annotated[str, Meta(min_length=8, max_length=64)]


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker (TP rank) of an engine.

    ``socket`` is the file name of its data socket beside the control socket, "" where there is none; ``port`` the TCP
    port of its data link at the host of the control endpoint, 0 where there is none.
    """

    socket: str = ""
    port: int = 0
    hello: Hello

    @property
    def rank(self) -> int:
        """Its rank among the engine's workers."""
        return self.hello.rank


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What ``GET /hello`` answers."""

    protocol: int
    name: str
    kind: str
    """``vllm``, ``sglang`` or ``reference``."""
    kind_version: str
    model: str
    dtype: str
    tensors: tuple[ParamMeta, ...]
    """Names, dtypes and shapes that a full refit must bring."""
    workers: tuple[WorkerInfo, ...]
    heartbeat_s: float
    """Interval of the lease's lines."""
    state: StateReport


class BeginRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /begin``. The answer is a stream that lives as long as the session: the trainer's lease.

    ``stand_s``: how long the engine may have to stand between two steps, for other engines of the same refit.
    """

    session: Session
    version: Annotated[int, Meta(ge=1, le=1 << 53)]
    tensors: Annotated[tuple[ParamMeta, ...], Meta(max_length=1 << 20)]
    stand_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0


class LeaseLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the lease's stream: a heartbeat, or how the session ended."""

    alive: bool
    ended: str = ""


class StepRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /pause``, ``/load``, ``/verify``, ``/commit``, ``/resume``, ``/abort``."""

    session: Session
    mode: PauseMode = "wait"
    """Only for pause: what happens to running requests."""
    deadline_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Only for pause and load: how long the engine may take."""
    reason: Annotated[str, Meta(max_length=2000)] = ""
    """Only for abort."""


class StepReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a step answers: the state after it, and what each worker said."""

    state: StateReport
    workers: tuple[dict[str, Any], ...] = ()


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """A typed error on its way back."""

    error: str
    """Name of the class in ``syncstack.errors``."""
    what: str
    observed: str | None = None
    expected: str | None = None
    consequence: str | None = None
    next_step: str | None = None

    @classmethod
    def of(cls, error: SyncstackError) -> ErrorReply:
        """The reply for ``error``."""
        return cls(
            error=type(error).__name__,
            what=error.what,
            observed=error.observed,
            expected=error.expected,
            consequence=error.consequence,
            next_step=error.next_step,
        )

    def to_error(self) -> SyncstackError:
        """The error again; one that this release does not know becomes an EngineError."""
        kind = getattr(errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, SyncstackError)) or kind is errors.RefitFailed:
            kind = EngineError
        return kind(
            self.what,
            observed=self.observed,
            expected=self.expected,
            consequence=self.consequence,
            next_step=self.next_step,
        )
