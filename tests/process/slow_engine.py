"""The reference engine whose loader takes its time, and which stops at a phase if it is told to, so that a test can act
in the middle of a load, or of any phase.

Only time is added; everything else is the engine as it ships.
usage: slow_engine.py SECONDS_PER_TENSOR engine reference ...
With TEST_HOLD=FILE: where FILE names a phase, the engine stops in it, makes FILE.held, and goes on when FILE is gone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from syncstack.cli import main
from syncstack.engines.reference.engine import ReferenceHost, ReferenceLoader
from syncstack.refit.control import Control
from syncstack.transports.stream.receiver import StreamedVersion

pause_s = float(sys.argv.pop(1))
load = ReferenceLoader.load


def slow(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for item in tensors:
        time.sleep(pause_s)
        yield item


class Hold:
    """Stops whoever comes by in the phase that the file names."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def reached(self, phase: str) -> bool:
        if not self._file.exists() or self._file.read_text() != phase:
            return False
        self._file.with_suffix(".held").touch()
        return True

    def before(self, phase: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def held(self_: Any, *args: Any) -> Any:
            name = args[0] if phase == "" else phase  # call_workers: its operation is the phase
            if self.reached(name):
                while self._file.exists():
                    await asyncio.sleep(0.01)
            return await method(self_, *args)

        return held

    def stage(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def held(self_: Any) -> Any:
            if self.reached("stage"):
                while self._file.exists():
                    time.sleep(0.01)
            return method(self_)

        return held


if pause_s:
    ReferenceLoader.load = lambda self, tensors: load(self, slow(tensors))  # type: ignore[method-assign]
if "TEST_HOLD" in os.environ:
    hold = Hold(Path(os.environ["TEST_HOLD"]))
    Control.begin = hold.before("begin", Control.begin)  # type: ignore[assignment, method-assign]
    StreamedVersion.finish_staging = hold.stage(StreamedVersion.finish_staging)  # type: ignore[method-assign]
    for method, phase in {"pause": "pause", "call_workers": "", "publish": "commit", "resume": "resume"}.items():
        setattr(ReferenceHost, method, hold.before(phase, getattr(ReferenceHost, method)))
main()
