"""A group of our own (Gloo): made from cards that somebody else carries, used as a chain, ended from any thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from syncstack.errors import DeadlineExceeded, GroupLost

Exchange = Callable[[bytes], Sequence[bytes]]
"""Give this member's card, get all members' in order. Called once, in the thread that makes the group."""

MAX_OPEN = 2
"""Pieces that may be under way from one member to the next: Gloo asks the receiver before it sends each."""

_WEIGHTS, _NEVER = 0, 1
"""Tags: what is sent, and what nobody sends."""


class _Work(Protocol):
    """What torch's stubs leave out, as far as it is used here."""

    def wait(self, timeout: timedelta) -> bool: ...


class _Gloo(Protocol):
    """As above."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Work: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Work: ...


_Store: Any = torch.distributed.Store  # type: ignore[attr-defined]
_ProcessGroupGloo: Any = torch.distributed.ProcessGroupGloo


class _Cards(_Store):  # type: ignore[misc]
    """What Gloo takes for a store: it sets this member's card and then reads everybody's."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._own = b""
        self._all: Sequence[bytes] | None = None

    def set(self, _key: str, value: bytes) -> None:
        """Called once, with this member's card."""
        self._own = bytes(value)

    def wait(self, _keys: list[str], _timeout: timedelta | None = None) -> None:
        """Everybody's cards come at once."""
        self._cards()

    def get(self, key: str) -> bytes:
        """The card of the member that ``key`` ends with."""
        return self._cards()[int(key.rpartition("/")[2])]

    def _cards(self) -> Sequence[bytes]:
        if self._all is None:
            self._all = self._exchange(self._own)
        return self._all


class Group:
    """One member. ``send`` is for member 0, ``receive`` for the others. One thread calls all but ``close``, which any
    may, and which ends the wait of another."""

    def __init__(self, place: int, size: int, *, host: str, exchange: Exchange, join_s: float, wait_s: float) -> None:
        """Connect to every other member within ``join_s``; blocks. ``host`` is the address of this process to listen
        at; ``wait_s`` may be set again.

        Raises GroupLost where a member cannot be reached, and whatever ``exchange`` raises.
        """
        self._place, self._size = place, size
        self.wait_s = wait_s
        """How long one piece may take from one member to the next."""
        self._open: deque[tuple[_Work, torch.Tensor]] = deque()
        self._passed_on: deque[tuple[_Work, torch.Tensor]] = deque()
        self._lock = threading.Lock()
        options = _ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=join_s)
        options._threads = 1
        try:
            options._devices = [_ProcessGroupGloo.create_device(hostname=host)]
            self._group: _Gloo | None = _ProcessGroupGloo(_Cards(exchange), place, size, options)
        except RuntimeError as error:
            raise GroupLost(
                f"member {place} of {size} could not join the group",
                observed=_first_line(error),
                next_step="open the ports between trainer and engines, and among engines; or use stream, which needs "
                "one port of each engine",
            ) from None

    @property
    def _gloo(self) -> _Gloo:
        group = self._group
        if group is None:
            raise GroupLost("the group was left")
        return group

    def send(self, data: torch.Tensor) -> None:
        """Send flat bytes to the next member; returns when at most ``MAX_OPEN`` pieces are under way. ``data`` must not
        change before ``settle``. Raises GroupLost or DeadlineExceeded."""
        self._open.append((self._begin(data, self._place + 1), data))
        while len(self._open) > MAX_OPEN:
            self._finish(*self._open.popleft())

    def receive(self, into: memoryview) -> None:
        """Fill ``into`` with what the member before sends next, and pass it on; complete after ``settle``. Raises as
        ``send``."""
        data = torch.frombuffer(into, dtype=torch.uint8)
        with _told(f"member {self._place - 1}"):
            self._open.append((self._gloo.recv([data], self._place - 1, _WEIGHTS), data))
        while len(self._open) > MAX_OPEN:
            self._arrived()

    def settle(self, *, passed_on: bool = False) -> None:
        """Wait for what is under way, and with ``passed_on`` also for what this member sends on. Raises as ``send``."""
        while self._open:
            self._arrived() if self._place else self._finish(*self._open.popleft())
        while passed_on and self._passed_on:
            self._finish(*self._passed_on.popleft())

    def _arrived(self) -> None:
        work, data = self._open.popleft()
        self._finish(work, data)
        if self._place + 1 < self._size:
            self._passed_on.append((self._begin(data, self._place + 1), data))

    def _begin(self, data: torch.Tensor, to: int) -> _Work:
        with _told(f"member {to}"):
            return self._gloo.send([data], to, _WEIGHTS)

    def _finish(self, work: _Work, _data: torch.Tensor) -> None:
        begin = time.monotonic()
        with _told("the group"):
            try:
                work.wait(timedelta(seconds=self.wait_s))
            except RuntimeError:
                if time.monotonic() - begin < self.wait_s:
                    raise
                raise DeadlineExceeded(
                    f"a piece of the weights did not pass between two members of a group in {self.wait_s:g} s",
                    observed=f"at member {self._place} of {self._size}",
                ) from None

    def close(self) -> None:
        """Leave. Whoever waits in this group, here or elsewhere, hears of it at once.

        Gloo has no call for that: ``abort`` lets a thread that waits go on waiting (seen in torch 2.13). But a receive
        that runs out of its time ends all connections of its group, so one is begun that nobody answers.
        """
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError):
            other = 0 if self._place else 1
            group.recv([torch.empty(1, dtype=torch.uint8)], other, _NEVER).wait(timedelta(milliseconds=1))
        self._open.clear()
        self._passed_on.clear()


@contextlib.contextmanager
def _told(whom: str) -> Iterator[None]:
    """Gloo's errors as GroupLost."""
    try:
        yield
    except RuntimeError as error:
        raise GroupLost(f"{whom} broke off", observed=_first_line(error)) from None


def _first_line(error: BaseException) -> str:
    """Gloo's text without the place in its source and what it thinks is typical."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.rpartition("] ")[2].partition(". This is typically")[0] if line.startswith("[") else line
