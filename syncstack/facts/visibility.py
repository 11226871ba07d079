"""The variables that hide GPUs, in every form that NVIDIA documents. What they resolve to, only the driver knows.

CUDA_VISIBLE_DEVICES is the CUDA driver's: it stops reading at the first entry that it cannot use, without a word. As
driver 580 does it (tests/fixtures/h200.json), a number is read by C's ``strtoul`` and what follows it is dropped, so
``0;1``, ``0 1`` and ``0:0`` are device 0; a whole name may be followed by anything, but none may begin with a space; an
index after a name, or a name after an index, ends the list.

NVIDIA_VISIBLE_DEVICES is the container toolkit's: it decided which devices this container got, and a bad entry there
keeps a container from starting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from syncstack.facts.model import VisibilityMask

# A UUID, possibly shortened; a MIG instance by its own UUID, or (before driver R470) by its GPU's.
_NAME: Final = re.compile(r"GPU-[0-9a-fA-F-]+|MIG-[0-9a-fA-F-]+|MIG-GPU-[0-9a-fA-F-]+/\d+/\d+")
_WHOLE: Final = re.compile(r"(?:GPU|MIG)-(?:-?[0-9a-fA-F]){32}")
_NUMBER: Final = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)
# An index, also of a MIG instance; a CDI name; the folder that stands for devices given as mounts.
_TOOLKIT: Final = re.compile(rf"{_NAME.pattern}|\d+|\d+:\d+|nvidia\.com/gpu=[\w:.-]+|/var/run/nvidia-container-devices")
_NONE: Final = {
    "CUDA_VISIBLE_DEVICES": ("", "-1", "NoDevFiles"),
    "NVIDIA_VISIBLE_DEVICES": ("", "none", "void"),
}


def parse(name: str, text: str | None) -> VisibilityMask:
    """Return how ``text``, the value of ``name``, is understood."""
    if text is None:
        return VisibilityMask(name=name, text=None, kind="unset")
    text = text.encode(errors="replace").decode()  # the environment may hold any bytes, a hello may not
    if text.strip() in _NONE[name]:
        return VisibilityMask(name=name, text=text, kind="none")
    if text.strip() == "all" and name == "NVIDIA_VISIBLE_DEVICES":
        return VisibilityMask(name=name, text=text, kind="all")
    read = _cuda if name == "CUDA_VISIBLE_DEVICES" else _toolkit
    entries: list[str] = []
    stopped_at = misread = ""
    for entry in text.split(","):
        found = read(entry, entries)
        if not found:
            stopped_at = repr(entry)
            break
        entries.append(found)
        if found != entry.strip() and not misread:
            misread = f"{entry!r} for {found}"
    return VisibilityMask(
        name=name,
        text=text,
        kind="list" if entries else "none",
        entries=tuple(entries),
        stopped_at=stopped_at,
        misread=misread,
    )


def _toolkit(entry: str, before: list[str]) -> str:  # noqa: ARG001 - as _cuda
    return entry.strip() if _TOOLKIT.fullmatch(entry.strip()) else ""


def _cuda(entry: str, before: list[str]) -> str:
    """Return what the driver takes ``entry`` for behind the entries ``before``, "" for the end of the list."""
    number = _NUMBER.match(entry)
    if before and before[0].isdigit() != (number is not None):
        return ""
    if number is not None:
        return _index(number[1])
    whole = _WHOLE.match(entry)
    return whole[0] if whole else entry if _NAME.fullmatch(entry) else ""


def _index(digits: str) -> str:
    """Return a number as the driver has it after strtoul: as an int, whose negative values end the list."""
    value = int(digits)
    value = (value if abs(value) < 1 << 64 else -1) & 0xFFFFFFFF
    return str(value) if value < 1 << 31 else ""


def repeated(mask: VisibilityMask) -> str:
    """Return the entry of CUDA's mask that names a device for the second time, as far as the names tell; "" for none.

    The driver then refuses the whole mask: cuInit fails with CUDA_ERROR_INVALID_DEVICE.
    """
    names = [entry if entry.isdigit() else entry.replace("-", "").lower() for entry in mask.entries]
    for place, name in enumerate(names):
        for other in names[:place]:
            if name == other or (not name.isdigit() and (name.startswith(other) or other.startswith(name))):
                return mask.entries[place]
    return ""


def masks(environ: Mapping[str, str]) -> tuple[VisibilityMask, ...]:
    """Return both masks as they are set in ``environ``."""
    return tuple(parse(name, environ.get(name)) for name in _NONE)
