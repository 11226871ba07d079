"""Record which system calls a command uses and which are refused to it, and write an allow-list out of that."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from syncstack.errors import DeadlineExceeded
from syncstack.seccomp import libseccomp
from syncstack.seccomp.apply import apply, check_applicable, restore_signals
from syncstack.seccomp.compile import REACHED, Reader
from syncstack.seccomp.generate import arg_rule
from syncstack.seccomp.load import load
from syncstack.seccomp.profile import Profile
from syncstack.seccomp.ptrace import Call, Ending, Tracer
from syncstack.seccomp.table import ARCHITECTURES, ARG_NOTES, ENOSYS, arg_rules

# What a filter answers, and the kernel itself at times: only the profile that we applied ourselves tells which it was.
_REFUSALS: Final = (errno.EPERM, errno.ENOSYS)

# Between the filter and the command's first instruction: runc (Go's runtime in it, and the change to the container's
# user), our own `run`, and the ways of ending and of being interrupted, which no recording sees all of.
_START: Final = """
    brk capget capset chdir close epoll_ctl epoll_pwait execve exit exit_group faccessat faccessat2 fchown fcntl fstat
    fstatfs futex getcwd getdents64 getpid getppid gettid getuid madvise mmap munmap nanosleep newfstatat openat prctl
    read restart_syscall rt_sigaction rt_sigprocmask rt_sigreturn sched_yield setgid setgroups setuid sigaltstack tgkill
    write"""


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """One system call: how often, which errnos came back, and how often the profile refused it."""

    name: str
    calls: int
    errors: dict[str, int]
    refused: int = 0


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """``exit`` is the command's status, or minus the signal; None when it was ended at the deadline.

    ``ended_in`` is the call that a signal ended it in: the refused one after SIGSYS. ``unusual`` are calls whose
    arguments our profiles refuse (a namespace flag, an address family).
    """

    command: tuple[str, ...]
    profile: str
    seconds: float
    exit: int | None
    ended_in: str
    calls: tuple[Used, ...]
    unusual: tuple[str, ...]


class _Recorder:
    """Counts calls. ``filter`` is the profile that the command runs under, if we applied one."""

    def __init__(self, applied: Profile | None) -> None:
        self._native = libseccomp.native()
        self._filter = None if applied is None else Reader(applied)
        rules = () if applied is None else applied.syscalls
        self._by_argument = {libseccomp.number_of(name) for rule in rules if rule.args for name in rule.names}
        self._answers: dict[int, str] = {}
        self._house = Reader(load("restrictive"))
        self._checked = {libseccomp.number_of(name) for name in ARG_NOTES}
        self.calls: Counter[tuple[int, int]] = Counter()
        self.errors: Counter[tuple[int, int, int]] = Counter()
        self.refused: Counter[tuple[int, int]] = Counter()
        self.unusual: set[int] = set()

    def seen(self, call: Call) -> None:
        """Count one call."""
        key = (call.arch, call.number)
        self.calls[key] += 1
        if call.error:
            self.errors[(*key, call.error)] += 1
        if call.arch != self._native:
            return
        if self._refused(call):
            self.refused[key] += 1
        elif call.number in self._checked and self._house.of_number(call.number, call.args) not in REACHED:
            self.unusual.add(call.number)

    def _refused(self, call: Call) -> bool:
        """Return whether our filter refuses a call. The errno does not say: a filter that kills leaves none."""
        if self._filter is None:
            return False
        if call.number in self._by_argument:
            return self._filter.of_number(call.number, call.args) not in REACHED
        if call.number not in self._answers:
            self._answers[call.number] = self._filter.of_number(call.number)
        return self._answers[call.number] not in REACHED

    def used(self) -> tuple[Used, ...]:
        """Return the calls, the most frequent first."""
        found = []
        for (arch, number), calls in self.calls.most_common():
            errors = {
                errno.errorcode.get(code, str(code)): times
                for (of_arch, of_number, code), times in sorted(self.errors.items())
                if (of_arch, of_number) == (arch, number)
            }
            name = name_of(number, arch)
            found.append(Used(name=name, calls=calls, errors=errors, refused=self.refused[arch, number]))
        return tuple(found)


def name_of(number: int, arch: int) -> str:
    """Return a call's name; its number where libseccomp does not know it, its architecture where it is another."""
    name = libseccomp.name_of(number, arch) or f"syscall_{number}"
    return name if arch == libseccomp.native() else f"{name}@{arch:#x}"


def record(command: Sequence[str], *, profile: str = "", caps: Sequence[str] = (), timeout_s: float) -> Recording:
    """Run ``command`` to its end, under ``profile`` if one is named, and return what it called.

    Its standard output goes to standard error: the report has the other to itself. ``UsageError`` if it cannot be
    traced or started. At the deadline all of it is killed; what was seen until then is returned.
    """
    applied = load(profile, caps=caps) if profile else None
    if applied is not None:
        check_applicable(applied)
    recorder = _Recorder(applied)

    def prepare() -> None:
        restore_signals()
        os.dup2(2, 1)
        if applied is not None:
            apply(applied)

    started = time.monotonic()
    ending: Ending | None
    try:
        ending = Tracer(command, prepare=prepare, seen=recorder.seen).run(timeout_s)
    except DeadlineExceeded:
        ending = None
    signalled = ending.last if ending is not None and ending.code < 0 else None
    return Recording(
        command=tuple(command),
        profile=profile,
        seconds=round(time.monotonic() - started, 3),
        exit=None if ending is None else ending.code,
        ended_in="" if signalled is None else name_of(signalled.number, signalled.arch),
        calls=recorder.used(),
        unusual=tuple(sorted(name_of(number, libseccomp.native()) for number in recorder.unusual)),
    )


def refusals(recording: Recording) -> tuple[Used, ...]:
    """Return the calls that were refused: by the profile if there was one, else those that answered EPERM or ENOSYS."""
    if recording.profile:
        return tuple(used for used in recording.calls if used.refused)
    codes = {errno.errorcode[code] for code in _REFUSALS}
    return tuple(used for used in recording.calls if codes & set(used.errors))


def allow_list(recording: Recording) -> dict[str, Any]:
    """Return a flat profile that allows what was seen and what starting needs; all else answers ENOSYS.

    Calls that the profile refused each time stay refused. clone3 stays out, since a filter cannot see its flags: glibc
    takes clone on ENOSYS. clone, socket and personality keep our rules on arguments unless the command went past them.
    """
    seen = {used.name for used in recording.calls if used.refused < used.calls and "@" not in used.name}
    if "clone3" in seen:
        seen = seen - {"clone3"} | {"clone"}
    ruled = seen & set(ARG_NOTES) - set(recording.unusual)
    names = sorted({name for name in seen - ruled if not name.startswith("syscall_")} | set(_START.split()))
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": ENOSYS,
        "architectures": [name for name in ARCHITECTURES if libseccomp.architecture(name) == libseccomp.native()],
        "syscalls": [
            {"names": names, "action": "SCMP_ACT_ALLOW"},
            # By a rule of its own: Docker before 23.0 answers EPERM by default, with which no thread can be started.
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
            *(arg_rule(rule) for rule in arg_rules() if rule.name in ruled),
        ],
    }
