"""Table -> flat OCI seccomp JSON, and the check that the committed files are what the table says.

Flat means: only keys of the OCI runtime specification. containerd and plain runc ignore Docker's ``includes``,
``excludes``, ``archMap`` and ``minKernel``, and would so allow every conditional rule (mount, bpf, ...) to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from syncstack.errors import ProfileError
from syncstack.seccomp.table import (
    ARCHITECTURES,
    ENOSYS,
    EPERM,
    PROFILES,
    ROWS,
    Answer,
    ArgRule,
    ProfileName,
    arg_rules,
)

_ACTION: dict[Answer, dict[str, Any]] = {
    Answer.ALLOW: {"action": "SCMP_ACT_ALLOW"},
    Answer.EPERM: {"action": "SCMP_ACT_ERRNO", "errnoRet": EPERM},
    # Also where it equals our default: Docker 20.10 reads errnoRet of a rule, and ignores defaultErrnoRet.
    Answer.ENOSYS: {"action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
}


def arg_rule(rule: ArgRule) -> dict[str, Any]:
    """Return a rule on an argument as the OCI specification writes it."""
    arg: dict[str, Any] = {"index": rule.index, "value": rule.value}
    if rule.op == "SCMP_CMP_MASKED_EQ":
        arg["valueTwo"] = rule.value_two
    arg["op"] = rule.op
    return {"names": [rule.name], **_ACTION[rule.answer], "args": [arg]}


def document(profile: ProfileName) -> dict[str, Any]:
    """Return ``profile`` as the ``linux.seccomp`` object of the OCI runtime specification."""
    syscalls: list[dict[str, Any]] = []
    for answer in Answer:
        names = sorted(name for row in ROWS if row.answer(profile) is answer for name in row.names)
        syscalls.append({"names": names, **_ACTION[answer]})
    syscalls.extend(arg_rule(rule) for rule in arg_rules())
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": ENOSYS,
        "architectures": list(ARCHITECTURES),
        "syscalls": syscalls,
    }


def render(profile: ProfileName) -> bytes:
    """Return the bytes of ``<profile>.json``; the same for the same table."""
    return msgspec.json.format(msgspec.json.encode(document(profile)), indent=2) + b"\n"


def write(folder: Path) -> list[Path]:
    """Write both profiles into ``folder`` (made if absent) and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{profile}.json" for profile in PROFILES]
    for profile, path in zip(PROFILES, paths, strict=True):
        path.write_bytes(render(profile))
    return paths


def _stale(folder: Path) -> Iterator[str]:
    for profile in PROFILES:
        path = folder / f"{profile}.json"
        if not path.is_file():
            yield f"{path} is missing"
        elif path.read_bytes() != render(profile):
            yield f"{path} differs"


def verify(folder: Path) -> None:
    """Raise ``ProfileError`` when a file in ``folder`` is not what the table generates."""
    stale = list(_stale(folder))
    if stale:
        raise ProfileError(
            "the seccomp profiles are not what syncstack/seccomp/table.py generates",
            observed="; ".join(stale),
            next_step=f"syncstack seccomp generate --out {folder}   (or: make seccomp)",
        )
