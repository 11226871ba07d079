"""Who this process is to the kernel's permission checks: ids and their maps, dumpable, Yama, security modules."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

import msgspec

from syncstack.facts.model import IdentityFacts
from syncstack.facts.process import read_text

_PR_GET_DUMPABLE: Final = 3


class Yama(msgspec.Struct, frozen=True, kw_only=True):
    """What kernel.yama.ptrace_scope says. ``present`` without ``scope``: Yama is there and does not let us read it."""

    present: bool
    scope: int | None
    evidence: str


def yama(root: Path = Path("/")) -> Yama:
    """Read the scope. A file that is absent is no error: it means a kernel without Yama."""
    path = root / "proc/sys/kernel/yama/ptrace_scope"
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return Yama(present=False, scope=None, evidence=f"{path} is absent: no Yama")
    except OSError as error:
        return Yama(present=True, scope=None, evidence=f"{path}: {error.strerror}")
    return Yama(present=True, scope=int(text) if text.isdigit() else None, evidence=f"{path}: {text}")


def label(pid: int | str = "self") -> str:
    """Return a process's AppArmor or SELinux label, "" where there is none or it is hidden."""
    return read_text(Path(f"/proc/{pid}/attr/current")).strip("\0\n ")


def id_map(text: str) -> str:
    """Return a uid_map or gid_map with one space between its numbers."""
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def dumpable() -> bool:
    """Whether processes of the same user may look into this one, as far as it is up to this one."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1)


def identity() -> IdentityFacts:
    """Return who this process is."""
    scope = yama()
    return IdentityFacts(
        uid=os.getuid(),
        gid=os.getgid(),
        euid=os.geteuid(),
        dumpable=dumpable(),
        uid_map=id_map(read_text(Path("/proc/self/uid_map"))),
        gid_map=id_map(read_text(Path("/proc/self/gid_map"))),
        lsms=read_text(Path("/sys/kernel/security/lsm")),
        lsm_label=label(),
        yama_scope=scope.scope,
        yama_evidence=scope.evidence,
    )
