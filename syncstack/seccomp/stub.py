"""runc's answer to numbers above the highest call that a profile names: ENOSYS instead of the default.

libseccomp has no rule for "any number above N", so runc puts a few instructions in front of the compiled program, and
so do we. Below that number a hole gets the default.
"""

from __future__ import annotations

import struct
from typing import Final

from syncstack.seccomp.table import ENOSYS

_X32_BIT: Final = 0x40000000

_LD_W_ABS: Final = 0x20
_JEQ_K: Final = 0x15
_JGE_K: Final = 0x35
_JGT_K: Final = 0x25
_RET_K: Final = 0x06
_RET_ERRNO: Final = 0x00050000


def program(highest: int, arch: int) -> bytes:
    """Return the head of a program: on ``arch``, a number above ``highest`` (x32 aside) answers ENOSYS.

    All else runs off its end, into the program that it is put in front of.
    """
    instructions = (
        (_LD_W_ABS, 0, 0, 4),  # seccomp_data.arch
        (_JEQ_K, 0, 4, arch),
        (_LD_W_ABS, 0, 0, 0),  # seccomp_data.nr
        (_JGE_K, 2, 0, _X32_BIT),
        (_JGT_K, 0, 1, highest),
        (_RET_K, 0, 0, _RET_ERRNO | ENOSYS),
    )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
