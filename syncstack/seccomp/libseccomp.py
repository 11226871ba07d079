"""The few functions of libseccomp.so.2 (2.5 or newer) that are needed here, typed: names, numbers, rules -> a program.

By ctypes and not through a package: pyseccomp, the one wrapper on PyPI, was last released in 2021 and wraps the same
calls; every Debian and Ubuntu has the library, because apt needs it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import POINTER, Structure, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Final

from syncstack.errors import ProfileError

_ACTIONS: Final = {
    "SCMP_ACT_KILL": 0x00000000,
    "SCMP_ACT_KILL_THREAD": 0x00000000,
    "SCMP_ACT_KILL_PROCESS": 0x80000000,
    "SCMP_ACT_TRAP": 0x00030000,
    "SCMP_ACT_ERRNO": 0x00050000,
    "SCMP_ACT_NOTIFY": 0x7FC00000,
    "SCMP_ACT_TRACE": 0x7FF00000,
    "SCMP_ACT_LOG": 0x7FFC0000,
    "SCMP_ACT_ALLOW": 0x7FFF0000,
}
_OPERATORS: Final = {
    f"SCMP_CMP_{name}": number for number, name in enumerate(("NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"), start=1)
}
_NR_SCMP_ERROR: Final = -1


class _ArgCmp(Structure):
    _fields_ = (("arg", c_uint), ("op", c_int), ("a", c_uint64), ("b", c_uint64))


class _Version(Structure):
    _fields_ = (("major", c_uint), ("minor", c_uint), ("micro", c_uint))


@cache
def _open() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError as error:
        raise ProfileError(
            "libseccomp.so.2 cannot be loaded", observed=str(error), next_step="apt-get install libseccomp2"
        ) from None
    lib.seccomp_init.restype = c_void_p
    lib.seccomp_init.argtypes = [c_uint32]
    lib.seccomp_release.restype = None
    lib.seccomp_release.argtypes = [c_void_p]
    lib.seccomp_version.restype = POINTER(_Version)
    lib.seccomp_export_bpf.argtypes = [c_void_p, c_int]
    lib.seccomp_arch_resolve_name.restype = c_uint32
    lib.seccomp_arch_resolve_name.argtypes = [c_char_p]
    lib.seccomp_arch_add.argtypes = [c_void_p, c_uint32]
    lib.seccomp_arch_native.restype = c_uint32
    lib.seccomp_syscall_resolve_name.argtypes = [c_char_p]
    lib.seccomp_syscall_resolve_num_arch.restype = c_void_p  # not c_char_p: the string is ours to free
    lib.seccomp_syscall_resolve_num_arch.argtypes = [c_uint32, c_int]
    lib.seccomp_rule_add_array.argtypes = [c_void_p, c_uint32, c_int, c_uint, POINTER(_ArgCmp)]
    return lib


def _lookup(table: dict[str, int], name: str, what: str) -> int:
    if name not in table:
        raise ProfileError(f"unknown {what}", observed=name, expected=", ".join(table))
    return table[name]


def action(name: str, errno_ret: int) -> int:
    """Return the number of a seccomp action; ``errno_ret`` counts for SCMP_ACT_ERRNO only."""
    number = _lookup(_ACTIONS, name, "seccomp action")
    return number | (errno_ret & 0xFFFF) if name == "SCMP_ACT_ERRNO" else number


def architecture(name: str) -> int:
    """Return libseccomp's token of an OCI architecture name, such as SCMP_ARCH_X86_64."""
    prefix, _, short = name.partition("SCMP_ARCH_")
    token = 0 if prefix else int(_open().seccomp_arch_resolve_name(short.lower().encode()))
    if token == 0:
        raise ProfileError("unknown architecture", observed=name, expected="SCMP_ARCH_X86_64, SCMP_ARCH_AARCH64, ...")
    return token


def version() -> str:
    """Return the library's version, such as 2.5.4."""
    found = _open().seccomp_version().contents
    return f"{found.major}.{found.minor}.{found.micro}"


def native() -> int:
    """Return this machine's architecture token: what the kernel puts into seccomp_data, too."""
    return int(_open().seccomp_arch_native())


def number_of(name: str) -> int | None:
    """Return the number of a system call, a negative pseudo number where only others have it, None if unknown."""
    number = int(_open().seccomp_syscall_resolve_name(name.encode()))
    return None if number == _NR_SCMP_ERROR else number


def name_of(number: int, arch: int) -> str | None:
    """Return the name of a call of ``arch`` (token); None if the library does not know it."""
    pointer = _open().seccomp_syscall_resolve_num_arch(arch, number)
    if not pointer:
        return None
    name = ctypes.string_at(pointer).decode()
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [c_void_p]
    libc.free(pointer)
    return name


class Filter:
    """One libseccomp filter under construction. ``export`` compiles it; ``close`` frees it."""

    def __init__(self, default_action: int) -> None:
        self._lib = _open()
        self._default = default_action
        self._ctx = self._lib.seccomp_init(default_action)
        if not self._ctx:
            raise ProfileError("libseccomp refuses the default action", observed=hex(default_action))

    def close(self) -> None:
        """Free the filter's memory."""
        if self._ctx:
            self._lib.seccomp_release(self._ctx)
            self._ctx = None

    def _check(self, code: int, what: str, *tolerated: int) -> None:
        if code < 0 and -code not in tolerated:
            name = errno.errorcode.get(-code, str(code))
            raise ProfileError(f"libseccomp: {what} failed", observed=f"{name} ({os.strerror(-code)})")

    def set_architectures(self, names: tuple[str, ...]) -> None:
        """Make ``names`` the architectures of the filter; a call of any other ends the caller (SIGSYS)."""
        tokens = [architecture(name) for name in names]
        for token in tokens:
            self._check(self._lib.seccomp_arch_add(self._ctx, token), "adding an architecture", errno.EEXIST)
        if native() not in tokens:
            raise ProfileError(
                "the profile does not list this machine's architecture",
                observed=", ".join(names),
                consequence="Every system call would end the process",
            )

    def add(self, rule_action: int, number: int, args: tuple[tuple[int, str, int, int], ...] = ()) -> None:
        """Add a rule; each of ``args`` is (index, operator, value, second value), all must hold.

        A rule that says what the default says is left out, as runc does: libseccomp refuses it.
        """
        if rule_action == self._default:
            return
        array = (_ArgCmp * len(args))(*(_ArgCmp(i, _lookup(_OPERATORS, op, "operator"), a, b) for i, op, a, b in args))
        code = self._lib.seccomp_rule_add_array(self._ctx, rule_action, number, len(args), array)
        self._check(code, f"adding a rule for call {number}")

    def export(self) -> bytes:
        """Return the compiled program, 8 bytes an instruction."""
        descriptor = os.memfd_create("seccomp", os.MFD_CLOEXEC)
        try:
            self._check(self._lib.seccomp_export_bpf(self._ctx, descriptor), "compiling the filter")
            return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        finally:
            os.close(descriptor)
