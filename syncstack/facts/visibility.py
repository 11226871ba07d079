"""The variables that hide GPUs, in every form that NVIDIA documents. What they resolve to, only the driver knows.

CUDA_VISIBLE_DEVICES is the CUDA driver's: it stops reading at the first entry that it cannot use, without a word.
NVIDIA_VISIBLE_DEVICES is the container toolkit's: it decided which devices this container got, and a bad entry there
keeps a container from starting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from syncstack.facts.model import VisibilityMask

# An index; a UUID, possibly shortened; a MIG instance by its own UUID, or (before driver R470) by its GPU's.
_COMMON: Final = r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-fA-F-]+|MIG-GPU-[0-9a-fA-F-]+/\d+/\d+"
# A MIG instance by index; a CDI name; the folder that stands for devices given as mounts.
_TOOLKIT: Final = r"\d+:\d+|nvidia\.com/gpu=[\w:.-]+|/var/run/nvidia-container-devices"

_ENTRY: Final = {
    "CUDA_VISIBLE_DEVICES": re.compile(_COMMON),
    "NVIDIA_VISIBLE_DEVICES": re.compile(f"{_COMMON}|{_TOOLKIT}"),
}
_NONE: Final = {
    "CUDA_VISIBLE_DEVICES": ("", "-1", "NoDevFiles"),
    "NVIDIA_VISIBLE_DEVICES": ("", "none", "void"),
}


def parse(name: str, text: str | None) -> VisibilityMask:
    """Return how ``text``, the value of ``name``, is understood; ``stopped_at`` quotes the first bad entry."""
    if text is None:
        return VisibilityMask(name=name, text=None, kind="unset")
    text = text.encode(errors="replace").decode()  # the environment may hold any bytes, a hello may not
    if text.strip() in _NONE[name]:
        return VisibilityMask(name=name, text=text, kind="none")
    if text.strip() == "all" and name == "NVIDIA_VISIBLE_DEVICES":
        return VisibilityMask(name=name, text=text, kind="all")
    entries, stopped_at = [], ""
    for entry in text.split(","):
        if not _ENTRY[name].fullmatch(entry.strip()):
            stopped_at = repr(entry)
            break
        entries.append(entry.strip())
    return VisibilityMask(
        name=name, text=text, kind="list" if entries else "none", entries=tuple(entries), stopped_at=stopped_at
    )


def masks(environ: Mapping[str, str]) -> tuple[VisibilityMask, ...]:
    """Return both masks as they are set in ``environ``."""
    return tuple(parse(name, environ.get(name)) for name in _ENTRY)
