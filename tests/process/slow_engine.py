"""The reference engine whose loader takes its time, so that a test can act in the middle of a load.

Only the time between two tensors is added; everything else is the engine as it ships.
usage: slow_engine.py SECONDS_PER_TENSOR engine reference ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch

from syncstack.cli import main
from syncstack.engines.reference.engine import ReferenceLoader

pause_s = float(sys.argv.pop(1))
load = ReferenceLoader.load


def slow(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for item in tensors:
        time.sleep(pause_s)
        yield item


if pause_s:
    ReferenceLoader.load = lambda self, tensors: load(self, slow(tensors))  # type: ignore[method-assign]
main()
