"""The ranks of one trainer among themselves: rank 0 leads a refit, the others do what it says and answer.

Typed messages over point-to-point calls of a Gloo group, which the trainer's own ``torch.distributed`` gives: the ranks
are one job and know each other already. Not ``broadcast_object_list`` and its like, which pickle, and no collective:
the leader hears which rank failed, and each wait has a deadline of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Meta

from syncstack.errors import RankLost, SyncstackError, UsageError
from syncstack.facts import Hello
from syncstack.plan import Choice
from syncstack.refit.messages import ErrorReply
from syncstack.refit.report import RefitReport
from syncstack.weights.manifest import MAX_SHARES, Wanted
from syncstack.wire.messages import Staged

MAX_BYTES = 64 << 20
"""Largest message: the tensors of a model with a million of them stay below it."""


MEET_S = 600.0
"""How much later than rank 0 another may come to the same refit; torch allows its own collectives as much. A rank that
has died is noticed at once."""


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to every other; each is answered by one Done, but for Retire and End."""


class Introduce(_Order, frozen=True, kw_only=True):
    """Say who you are, with your facts as they are now."""


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, as the leader knows it: its address, the nonce of each worker, and the plan of each link from the
    rank that is told."""

    address: str
    workers: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    """For each rank, by rank: the plan of its link to each worker."""


class Connect(_Order, frozen=True, kw_only=True):
    """Have links to these engines and no others, and try ``transport`` on each."""

    transport: str
    engines: tuple[Engine, ...]


class Measure(_Order, frozen=True, kw_only=True):
    """Move tensors like these over all links together, at the same time as the others, and time it."""

    wanted: tuple[Wanted, ...]


class Send(_Order, frozen=True, kw_only=True):
    """Stage your share of a version."""

    session: str
    version: int
    wanted: tuple[Wanted, ...]


class Retire(_Order, frozen=True, kw_only=True):
    """A worker may still read what was staged last: give it up. With ``links``: those too."""

    links: bool


class End(_Order, frozen=True, kw_only=True):
    """The refit has ended on rank 0: with reports, or with an error."""

    version: int
    reports: tuple[RefitReport, ...] = ()
    error: ErrorReply | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's answer; what it was not asked for is left out."""

    error: ErrorReply | None = None
    hello: Hello | None = None
    refused: str = ""
    """The link that a trial refused, and why."""
    first: float = 0.0
    again: float = 0.0
    """Bytes per second: see Rate."""
    staged: tuple[Staged, ...] = ()
    bytes: int = 0
    cast_bytes: int = 0


Order = Introduce | Connect | Measure | Send | Retire | End

_Length = Annotated[int, Meta(ge=0, le=MAX_BYTES)]


class Alone:
    """A trainer of one rank, which has nobody to tell anything."""

    rank = 0
    size = 1

    def tell(self, order: Order) -> None:
        """See Ranks."""

    @contextlib.contextmanager
    def together(self, order: Order, *, wait_s: float) -> Iterator[list[Done]]:  # noqa: ARG002 - see Ranks
        """See Ranks."""
        yield []


class Ranks(Alone):
    """All ranks of one trainer. Every rank makes one, together. Used from one thread of each rank; those of the leader
    take turns."""

    def __init__(self, group: Any = None) -> None:
        """``group``: a Gloo group of exactly these ranks; left out: one of all ranks of the default group is made.

        Collective. Raises UsageError without a default group, for another backend, or for too many ranks.
        """
        if not dist.is_initialized():
            raise UsageError("several trainer ranks need torch.distributed", next_step="call init_process_group first")
        made = group if group is not None else dist.new_group(backend="gloo")
        if dist.get_backend(made) != "gloo":
            raise UsageError("trainer ranks talk over Gloo", observed=dist.get_backend(made))
        if made.size() > MAX_SHARES:
            raise UsageError("too many trainer ranks", observed=str(made.size()), expected=f"<= {MAX_SHARES}")
        self._group = made
        self._broken = ""
        self._turn = threading.Lock()
        self.rank = made.rank()
        self.size = made.size()

    def tell(self, order: Order) -> None:
        """Rank 0: say it to every other rank; waits until it is heard. Raises RankLost."""
        with self._turn:
            self._say(order)

    @contextlib.contextmanager
    def together(self, order: Order, *, wait_s: float) -> Iterator[list[Done]]:
        """Rank 0: the others carry out ``order`` while the block runs; behind it the list has their answers, by rank.

        ``wait_s`` is how long they may take longer than twice what the block did. Raises RankLost, or the error of the
        first rank that answers with one, when all have answered; after a failure of the block they are waited for and
        not looked at.
        """
        found: list[Done] = []
        with self._turn:
            self._say(order)
            begin = time.monotonic()
            try:
                yield found
            except BaseException:
                with contextlib.suppress(SyncstackError):
                    self._answers(wait_s + time.monotonic() - begin)
                raise
            found += self._answers(wait_s + time.monotonic() - begin)
        for rank, done in enumerate(found, 1):
            if done.error is not None:
                raise _of_rank(rank, done.error)

    def _answers(self, wait_s: float) -> list[Done]:
        return [self._receive(Done, rank, wait_s) for rank in range(1, self.size)]

    def _say(self, order: Order) -> None:
        data = msgspec.msgpack.encode(order)
        for rank in range(1, self.size):
            self._send(data, rank, MEET_S)

    def hear(self, *, wait_s: float) -> Order:
        """Another rank: wait for rank 0's next order. Raises RankLost."""
        order: Order = self._receive(Order, 0, wait_s)
        return order

    def answer(self, done: Done, *, wait_s: float) -> None:
        """Another rank: answer it. Raises RankLost."""
        self._send(msgspec.msgpack.encode(done), 0, wait_s)

    def _send(self, data: bytes, rank: int, wait_s: float) -> None:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), payload):
            self._do("send", tensor, rank, wait_s)

    def _receive(self, kind: Any, rank: int, wait_s: float) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._do("recv", length, rank, wait_s)
        try:
            payload = torch.zeros(msgspec.convert(length.item(), _Length), dtype=torch.uint8)
            self._do("recv", payload, rank, wait_s)
            return msgspec.msgpack.decode(payload.numpy().tobytes(), type=kind)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            self._broken = f"rank {rank} says something that is not known here: {error}"
            raise RankLost(self._broken, next_step="run one syncstack release on all ranks") from None

    def _do(self, what: str, tensor: torch.Tensor, rank: int, wait_s: float) -> None:
        if self._broken:
            raise RankLost("the ranks of this trainer have lost each other", observed=self._broken, next_step=_RESTART)
        try:
            getattr(self._group, what)([tensor], rank, 0).wait(timedelta(seconds=wait_s))
        except RuntimeError as error:
            self._broken = f"rank {rank}: {str(error).splitlines()[0]}"
            raise RankLost(
                f"trainer rank {rank} has gone, or was silent for {wait_s:g} s",
                observed=str(error).splitlines()[0],
                next_step=_RESTART,
            ) from None


_RESTART = "restart the trainer: its other ranks wait for the one that is lost"


def _of_rank(rank: int, reply: ErrorReply) -> SyncstackError:
    error = reply.to_error()
    return type(error)(
        f"on trainer rank {rank}: {error.what}",
        observed=error.observed,
        expected=error.expected,
        consequence=error.consequence,
        next_step=error.next_step,
    )


def reply_of(error: Exception) -> ErrorReply:
    """Any exception, to be told to another rank."""
    if isinstance(error, SyncstackError):
        return ErrorReply.of(error)
    return ErrorReply(error="TransportError", what=f"{type(error).__name__}: {error}"[:8000])


def first_error(found: Sequence[Done]) -> str:
    """The first link that a rank's trial refused; "" where none did."""
    return next((f"rank {rank}: {done.refused}" for rank, done in enumerate(found, 1) if done.refused), "")
