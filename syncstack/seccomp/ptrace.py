"""Follow every system call of a command and of all that it starts, with its answer: ptrace(2), no other tool.

ptrace and not a filter: a filter sees a call before it happens, so it knows no answers, and one that another filter
refuses it does not see at all. ptrace needs no privilege for one's own children, and sees both. It costs two stops a
call (some 20 microseconds each here), a traced program cannot trace (gdb), and setuid programs lose their privilege.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any, Final, NoReturn

import msgspec

from syncstack.errors import DeadlineExceeded, SyncstackError, UsageError

_SYSCALL: Final = 24
_GETEVENTMSG: Final = 0x4201
_SEIZE: Final = 0x4206
_INTERRUPT: Final = 0x4207
_LISTEN: Final = 0x4208
_GET_SYSCALL_INFO: Final = 0x420E
# SYSGOOD, FORK, VFORK, CLONE, EXEC, EXITKILL: nothing that we follow outlives us.
_OPTIONS: Final = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x100000
_BIRTHS: Final = (1, 2, 3)  # fork, vfork, clone
_EVENT_EXEC: Final = 4
_EVENT_STOP: Final = 128
_ENTRY, _EXIT = 1, 2
_WALL: Final = 0x40000000
_STOPS: Final = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


class _Info(ctypes.Structure):
    """struct ptrace_syscall_info; ``data`` is number and arguments on entry, result and is_error on exit."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("data", ctypes.c_uint64 * 8),
    )


class Call(msgspec.Struct, frozen=True):
    """One system call. ``error`` is its errno, 0 for none, also where the caller ended in it."""

    arch: int
    number: int
    args: tuple[int, ...]
    error: int = 0


class Ending(msgspec.Struct, frozen=True):
    """How the command ended: its exit status, or minus the signal; ``last`` is the call that it ended in."""

    code: int
    last: Call | None


@cache
def _function() -> Any:
    function = ctypes.CDLL(None, use_errno=True).ptrace
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return function


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _function()(request, pid, address, data) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise ``DeadlineExceeded`` out of a wait after ``seconds``; Ctrl-C goes to the command alone meanwhile."""

    def ring(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise DeadlineExceeded("the command did not end in time", observed=f"still running after {seconds:g} s")

    alarm = signal.signal(signal.SIGALRM, ring)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, interrupt)


def _start(command: Sequence[str], prepare: Callable[[], None]) -> tuple[int, int, int]:
    """Fork a child that waits; return its pid, the pipe that lets it go on and the pipe that says what went wrong."""
    gate, go = os.pipe()
    errors, complain = os.pipe()
    pid = os.fork()
    if pid:
        os.close(gate)
        os.close(complain)
        return pid, go, errors
    try:
        os.close(go)
        if os.read(gate, 1):
            prepare()
            os.execvp(command[0], list(command))  # noqa: S606 - no shell is the point
    except SyncstackError as error:
        os.write(complain, str(error).encode())
    except OSError as error:
        os.write(complain, f"cannot run {command[0]!r} (observed: {error.strerror})".encode())
    finally:
        os._exit(127)


class Tracer:
    """One run of a command under ptrace. ``seen`` is called with every call from the command's start on."""

    def __init__(self, command: Sequence[str], *, prepare: Callable[[], None], seen: Callable[[Call], None]) -> None:
        self._seen = seen
        self._pending: dict[int, Call] = {}
        self._last: dict[int, Call] = {}
        self._started = False
        self._ending = Ending(127, None)
        self._info = _Info()
        self._pid, self._go, self._errors = _start(command, prepare)
        self._live = {self._pid}
        self._early: set[int] = set()

    def run(self, timeout_s: float) -> Ending:
        """Follow the command until it and all that it started have ended.

        ``UsageError`` if it cannot be traced or started, ``DeadlineExceeded`` after ``timeout_s``: all of it is killed.
        """
        try:
            self._seize()
            with _deadline(timeout_s):
                self._follow()
            if not self._started:
                raise UsageError(os.read(self._errors, 4096).decode() or "the command was ended before it started")
            return self._ending
        finally:
            self._end()

    def _seize(self) -> None:
        try:
            _ptrace(_SEIZE, self._pid, 0, _OPTIONS)
        except OSError as error:
            raise UsageError(
                "this process may not trace its own child",
                observed=f"ptrace(PTRACE_SEIZE) = {error.strerror}",
                next_step="record outside this container, with --profile for the filter it has",
            ) from None
        _ptrace(_INTERRUPT, self._pid)
        os.waitpid(self._pid, _WALL)
        self._resume(self._pid, 0)
        os.write(self._go, b"x")

    def _follow(self) -> None:
        # Until our own have ended: children that this process had before it was us are none of ours.
        while self._live:
            tid, status = os.waitpid(-1, _WALL)
            if not os.WIFSTOPPED(status):
                self._ended(tid, status)
                continue
            if tid not in self._live:  # its parent's word of it is still to come
                self._live.add(tid)
                self._early.add(tid)
            self._stopped(tid, os.WSTOPSIG(status), status >> 16)

    def _ended(self, tid: int, status: int) -> None:
        self._live.discard(tid)
        call, last = self._ended_in(tid), self._last.pop(tid, None)
        if tid == self._pid:
            code = os.waitstatus_to_exitcode(status)
            # A filter that kills does it on the way out of the call, so that was the last one to return.
            self._ending = Ending(code, call or (last if code == -signal.SIGSYS else None))

    def _ended_in(self, tid: int) -> Call | None:
        """Count the call that a thread does not return from, and return it."""
        call = self._pending.pop(tid, None)
        if call is not None and self._started:
            self._seen(call)
        return call

    def _stopped(self, tid: int, number: int, event: int) -> None:
        if number == signal.SIGTRAP | 0x80:
            self._syscall(tid)
        elif event == _EVENT_STOP and number in _STOPS:
            with suppress(ProcessLookupError):
                _ptrace(_LISTEN, tid)
            return
        elif event in _BIRTHS:
            child = self._message(tid)
            (self._early.discard if child in self._early else self._live.add)(child)
        elif event == _EVENT_EXEC:
            self._executed(tid)
        # Any other event is ours; without one it is a signal on its way to the command.
        self._resume(tid, 0 if event or number == signal.SIGTRAP | 0x80 else number)

    def _executed(self, tid: int) -> None:
        """An exec ends all other threads; the one that called it goes on under the number of the process."""
        former = self._message(tid)
        if former != tid:
            self._live.discard(former)
            if former in self._pending:
                self._pending[tid] = self._pending.pop(former)
        self._started = True

    def _message(self, tid: int) -> int:
        """Return the thread that an event of ``tid`` is about; ``tid`` itself if it was killed meanwhile."""
        message = ctypes.c_ulong(tid)
        with suppress(ProcessLookupError):
            _ptrace(_GETEVENTMSG, tid, 0, ctypes.addressof(message))
        return message.value

    def _syscall(self, tid: int) -> None:
        info = self._info
        with suppress(ProcessLookupError):
            _ptrace(_GET_SYSCALL_INFO, tid, ctypes.sizeof(info), ctypes.addressof(info))
            if info.op == _ENTRY:
                self._pending[tid] = Call(info.arch, info.data[0], tuple(info.data[1:7]))
            elif info.op == _EXIT and tid in self._pending:
                call = self._pending.pop(tid)
                if self._started:
                    error = -ctypes.c_int64(info.data[0]).value if info.data[1] & 0xFF else 0
                    # Above 511 the kernel talks to itself: a call that a signal interrupted is made again.
                    self._last[tid] = Call(call.arch, call.number, call.args, error if error < 512 else 0)
                    self._seen(self._last[tid])

    def _resume(self, tid: int, number: int) -> None:
        with suppress(ProcessLookupError):  # it was killed while it was stopped
            _ptrace(_SYSCALL, tid, 0, number)

    def _end(self) -> None:
        """Kill and reap what is left. A child that was never let go reads an end of file and exits."""
        for tid in tuple(self._pending):
            self._ended_in(tid)
        os.close(self._go)
        os.close(self._errors)
        for tid in self._live:
            _kill(tid)
        while self._live:
            try:
                tid, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                return
            if os.WIFSTOPPED(status):  # born meanwhile
                self._live.add(tid)
                _kill(tid)
            else:
                self._live.discard(tid)


def _kill(tid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(tid, signal.SIGKILL)
