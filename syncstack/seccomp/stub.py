"""runc's answer to numbers above the highest call that a profile names: ENOSYS instead of the default errno.

libseccomp has no rule for "any number above N", so runc patches the compiled program. Here it is a second, tiny filter,
loaded last: among filters that answer with an errno the latest one's errno counts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Final

from syncstack.errors import ProfileError
from syncstack.seccomp.table import ENOSYS

# machine -> (number of seccomp(2), AUDIT_ARCH token that the kernel puts into seccomp_data)
_MACHINES: Final = {"x86_64": (317, 0xC000003E), "aarch64": (277, 0xC00000B7)}
_SET_MODE_FILTER: Final = 1
_FLAG_TSYNC: Final = 1
_RET_ALLOW: Final = 0x7FFF0000
_RET_ERRNO: Final = 0x00050000
_X32_BIT: Final = 0x40000000

_LD_W_ABS: Final = 0x20
_JEQ_K: Final = 0x15
_JGE_K: Final = 0x35
_JGT_K: Final = 0x25
_RET_K: Final = 0x06


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def program(highest: int, arch: int) -> bytes:
    """Return the classic BPF program: on ``arch``, a number above ``highest`` (x32 aside) answers ENOSYS."""
    instructions = (
        (_LD_W_ABS, 0, 0, 4),  # seccomp_data.arch
        (_JEQ_K, 0, 3, arch),
        (_LD_W_ABS, 0, 0, 0),  # seccomp_data.nr
        (_JGE_K, 1, 0, _X32_BIT),
        (_JGT_K, 1, 0, highest),
        (_RET_K, 0, 0, _RET_ALLOW),
        (_RET_K, 0, 0, _RET_ERRNO | ENOSYS),
    )
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def load_stub(highest: int) -> None:
    """Load the stub for this machine into all threads. no_new_privs must be set already."""
    number, arch = _MACHINES[platform.machine()]
    code = program(highest, arch)
    buffer = ctypes.create_string_buffer(code, len(code))
    prog = _Program(length=len(code) // 8, instructions=ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number), ctypes.c_long(_SET_MODE_FILTER), ctypes.c_long(_FLAG_TSYNC), ctypes.byref(prog)
    )
    if result != 0:
        number = ctypes.get_errno()
        raise ProfileError(
            "the ENOSYS stub cannot be loaded",
            observed=errno.errorcode.get(number, str(number)) if result < 0 else f"thread {result} has another filter",
            expected="a profile that allows seccomp(2)",
            consequence=os.strerror(number) if result < 0 else None,
        )
