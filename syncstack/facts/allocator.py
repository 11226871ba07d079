"""Whether torch's CUDA allocator uses expandable segments: memory of that kind needs another way to be shared.

torch reads the first variable that is set: PYTORCH_CUDA_ALLOC_CONF, PYTORCH_HIP_ALLOC_CONF (2.11 in CUDA builds
too), PYTORCH_ALLOC_CONF. A program may change the setting later, so where torch is loaded it is asked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, Final

from syncstack.facts.model import AllocatorFact

NAMES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The first that is set wins, also when it is empty."""

_SETTING: Final = re.compile(r"(?:^|,)expandable_segments:(\w+)")


def expandable(text: str) -> bool:
    """Return what an allocator setting says; the last mention counts, and spaces do not."""
    found = _SETTING.findall(text.replace(" ", ""))
    return bool(found) and found[-1] == "True"


def allocator(environ: Mapping[str, str], torch: Any = None) -> AllocatorFact:
    """Return the setting in force. ``torch`` is the module, by default the loaded one; nothing is imported."""
    given = [f"{name}={environ[name]!r}" for name in NAMES if name in environ]
    shown = " and ".join(given) or f"none of {', '.join(NAMES)} is set"
    loaded = sys.modules.get("torch") if torch is None else torch
    if _recording(loaded):
        shown += "; torch was not asked, because it records its memory's history"
    told = _in_use(loaded)
    if told is not None:
        return AllocatorFact(expandable_segments=told, evidence=f"torch's allocator itself says {told}; {shown}")
    asked = _ask(loaded)
    if asked is not None:
        return AllocatorFact(expandable_segments=expandable(asked), evidence=f"torch itself says {asked!r}; {shown}")
    first = next((name for name in NAMES if name in environ), "")
    if len(given) > 1:
        shown += f"; torch reads {first} only"
    return AllocatorFact(expandable_segments=expandable(environ.get(first, "")), evidence=shown)


def _recording(torch: Any) -> bool:
    return bool(getattr(getattr(torch, "_C", None), "_cuda_isHistoryEnabled", bool)())


def _in_use(torch: Any) -> bool | None:
    """Return what the allocator goes by; None before CUDA is used in this process, which asking must not begin.

    It is told only with all memory's blocks: 2 ms for 3000. With their history too it would be seconds.
    """
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    try:
        if _recording(torch):
            return None
        found = cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    except (AttributeError, KeyError, RuntimeError, TypeError):  # another backend, or another version
        return None
    return found if isinstance(found, bool) else None


def _ask(torch: Any) -> str | None:
    """Return the settings as torch 2.12 and newer tell them; None where it is not loaded, or does not tell."""
    get = getattr(getattr(torch, "_C", None), "_accelerator_getAllocatorSettings", None)
    try:
        return None if get is None else str(get())
    except RuntimeError:
        return None
