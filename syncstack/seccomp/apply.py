"""Apply a seccomp profile to this process, the way runc does, without a container.

Filters only narrow and stay for good, in all threads and in everything the process starts. ``no_new_privs`` is set, so
setuid programs lose their privilege.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from collections.abc import Sequence
from typing import Final, NoReturn

from syncstack.errors import ProfileError, UsageError
from syncstack.seccomp.compile import Compiled, compile_profile
from syncstack.seccomp.profile import Profile

# The number of seccomp(2), which has no wrapper in libc.
_NUMBERS: Final = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER: Final = 1
_FLAG_TSYNC: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_SUPERVISED: Final = ("SCMP_ACT_NOTIFY", "SCMP_ACT_TRACE")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def load_program(code: bytes) -> None:
    """Set no_new_privs and load a program into all threads of this process, for good; ``ProfileError`` says why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(length=len(code) // 8, instructions=ctypes.addressof(buffer))
    number = ctypes.c_long(_NUMBERS[platform.machine()])
    result = libc.syscall(number, ctypes.c_long(_SET_MODE_FILTER), ctypes.c_long(_FLAG_TSYNC), ctypes.byref(program))
    if result == 0:
        return
    code_number = ctypes.get_errno()
    raise ProfileError(
        "the kernel refused the seccomp filter",
        observed=errno.errorcode.get(code_number, str(code_number))
        if result < 0
        else f"thread {result} has a filter of its own",
        expected="seccomp(2) allowed here, and no thread with a filter that the others do not have",
        consequence=os.strerror(code_number) if result < 0 else None,
    )


def check_applicable(profile: Profile) -> None:
    """Raise ``ProfileError`` for a profile that needs a supervisor, which a plain process does not have."""
    for action in (profile.default_action, *(rule.action for rule in profile.syscalls)):
        if action in _SUPERVISED:
            raise ProfileError(
                "the profile asks a supervisor",
                observed=action,
                expected="SCMP_ACT_ALLOW, LOG, ERRNO, TRAP or KILL",
                consequence="Without one such a call would fail or wait for ever",
            )


def apply(profile: Profile) -> Compiled:
    """Apply a flat ``profile`` to all threads of this process, for good.

    Raises ``ProfileError`` with nothing loaded.
    """
    check_applicable(profile)
    compiled = compile_profile(profile)
    load_program(compiled.code)
    return compiled


def restore_signals() -> None:
    """Give back the signals that Python ignores, as a command expects them. Before a filter, which may forbid it."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def execute(command: Sequence[str]) -> NoReturn:
    """Replace this process by ``command`` (looked up on PATH); ``UsageError`` when it cannot be started."""
    try:
        os.execvp(command[0], list(command))  # noqa: S606 - no shell is the point
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}", observed=error.strerror) from None
