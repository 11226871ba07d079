"""NVIDIA devices, by the files of the driver only: opening a device would leave a context behind."""

from __future__ import annotations

import re
from pathlib import Path

from syncstack.facts.model import GpuFacts

_DEVICE = re.compile(r"nvidia\d+")


def gpus(root: Path = Path("/")) -> GpuFacts:
    """Return how many device files there are, and what was looked at."""
    devices = root / "dev"
    names = sorted(path.name for path in devices.iterdir() if _DEVICE.fullmatch(path.name)) if devices.is_dir() else []
    if names:
        return GpuFacts(count=len(names), evidence=f"/dev: {', '.join(names)}")
    driver = (root / "proc/driver/nvidia/version").exists()
    return GpuFacts(
        count=0,
        evidence="the driver is loaded, but no /dev/nvidia* here: the container was given no device"
        if driver
        else "no /dev/nvidia* and no NVIDIA driver",
    )
