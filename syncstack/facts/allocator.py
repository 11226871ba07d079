"""Whether torch's CUDA allocator uses expandable segments: memory of that kind needs another way to be shared.

torch 2.9 to 2.13 read PYTORCH_CUDA_ALLOC_CONF, and PYTORCH_ALLOC_CONF only where the first is not set. A program may
change the setting later, so where torch is loaded it is asked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, Final

from syncstack.facts.model import AllocatorFact

NAMES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The first that is set wins, also when it is empty."""

_SETTING: Final = re.compile(r"(?:^|,)expandable_segments:(\w+)")


def expandable(text: str) -> bool:
    """Return what an allocator setting says; the last mention counts, and spaces do not."""
    found = _SETTING.findall(text.replace(" ", ""))
    return bool(found) and found[-1] == "True"


def allocator(environ: Mapping[str, str], torch: Any = None) -> AllocatorFact:
    """Return the setting in force. ``torch`` is the module, by default the loaded one; nothing is imported."""
    given = [f"{name}={environ[name]!r}" for name in NAMES if name in environ]
    shown = " and ".join(given) or f"neither {NAMES[0]} nor {NAMES[1]} is set"
    asked = _ask(sys.modules.get("torch") if torch is None else torch)
    if asked is not None:
        return AllocatorFact(expandable_segments=expandable(asked), evidence=f"torch itself says {asked!r}; {shown}")
    text = next((environ[name] for name in NAMES if name in environ), "")
    if len(given) > 1:
        shown += f"; torch reads {NAMES[0]} only"
    return AllocatorFact(expandable_segments=expandable(text), evidence=shown)


def _ask(torch: Any) -> str | None:
    """Return torch's own setting; None where it is not loaded, or is a version that does not tell."""
    get = getattr(getattr(torch, "_C", None), "_accelerator_getAllocatorSettings", None)
    try:
        return None if get is None else str(get())
    except RuntimeError:
        return None
