"""The shapes of Qwen2.5-3B, and what the GPU benchmarks ran on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import torch

HIDDEN, MLP, LAYERS, VOCAB, KV = 2048, 11008, 36, 151936, 256
"""Qwen2.5-3B; its head is tied to its embedding."""


def shapes() -> Iterator[tuple[int, ...]]:
    """Every tensor of the model, in order."""
    yield VOCAB, HIDDEN
    for _ in range(LAYERS):
        yield from ((HIDDEN, HIDDEN), (HIDDEN,), (KV, HIDDEN), (KV,), (KV, HIDDEN), (KV,), (HIDDEN, HIDDEN))
        yield from ((MLP, HIDDEN), (MLP, HIDDEN), (HIDDEN, MLP), (HIDDEN,), (HIDDEN,))
    yield (HIDDEN,)


def machine() -> dict[str, str]:
    """What it ran on."""
    import triton  # not where there is no GPU

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.check_output(query, text=True, timeout=60).strip().split("\n")[0].split(", ")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    return {"gpu": name, "driver": driver, **versions}
