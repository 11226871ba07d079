"""Read a seccomp program: what it answers to one system call, without loading it.

The program that libseccomp compiles is what the kernel runs, so it is the one place where all rules, their order and
their conflicts are decided. Classic BPF jumps forward only, so every walk ends.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final

_INSTRUCTION: Final = "=HBBI"
_NR: Final = 0
_ARCH: Final = 4
_ARGS: Final = 16  # struct seccomp_data: int nr; u32 arch; u64 instruction pointer; u64 args[6]
_MASK32: Final = 0xFFFFFFFF

# The operations that libseccomp and runc's stub use.
_LD_W_ABS: Final = 0x20
_ALU_AND_K: Final = 0x54
_JA: Final = 0x05
_RET_K: Final = 0x06
_JUMPS: Final[Mapping[int, Callable[[int, int], bool]]] = {
    0x15: lambda word, k: word == k,
    0x25: lambda word, k: word > k,
    0x35: lambda word, k: word >= k,
    0x45: lambda word, k: bool(word & k),
}

# Return value without its low 16 bits -> our word.
_WORDS: Final = {
    0x80000000: "kill",
    0x00000000: "kill",
    0x00030000: "trap",
    0x7FC00000: "notify",
    0x7FF00000: "trace",
    0x7FFC0000: "log",
    0x7FFF0000: "allow",
}
_ERRNO: Final = 0x00050000

Instruction = tuple[int, int, int, int]


def instructions(code: bytes) -> tuple[Instruction, ...]:
    """Return the (code, jump if true, jump if false, k) of a program as the kernel stores it, 8 bytes each."""
    return tuple(struct.iter_unpack(_INSTRUCTION, code))


def word(value: int) -> str:
    """Return a program's return value as ``allow``, ``log``, ``kill``, ``trap``, ``trace``, ``notify`` or an errno."""
    action, data = value & 0xFFFF0000, value & 0xFFFF
    if action == _ERRNO:
        return errno.errorcode.get(data, f"errno {data}")
    return _WORDS[action]


def _load(offset: int, number: int, arch: int, args: Sequence[int]) -> int:
    """Return the 32 bits at ``offset`` of seccomp_data (little endian); an argument that is not given is 0."""
    if offset == _NR:
        return number
    if offset == _ARCH:
        return arch
    index, half = divmod(offset - _ARGS, 8)
    value = args[index] if 0 <= index < len(args) else 0
    return value >> (32 if half else 0) & _MASK32


def answer(program: Sequence[Instruction], *, number: int, arch: int, args: Sequence[int] = ()) -> str:
    """Return what ``program`` answers to the call ``number`` of ``arch`` (AUDIT_ARCH token), in our words."""
    pc, acc = 0, 0
    while True:
        code, if_true, if_false, k = program[pc]
        pc += 1
        if code == _RET_K:
            return word(k)
        if code == _LD_W_ABS:
            acc = _load(k, number, arch, args)
        elif code == _ALU_AND_K:
            acc &= k
        elif code == _JA:
            pc += k
        elif code in _JUMPS:
            pc += if_true if _JUMPS[code](acc, k) else if_false
        else:
            raise ValueError(f"not an operation of a seccomp filter: {code:#x}")
