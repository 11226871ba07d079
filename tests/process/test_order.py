"""A refit that is asked for while the weights are still being made reads them when they are made (bug-log row A24).

The event is a fake here, and whoever makes the weights is a thread; tests/unit/test_host_fd_gpu.py has real kernels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from syncstack import Coordinator, EngineClient, ModuleSource, Settings
from syncstack.errors import RefitFailed
from syncstack.refit import coordinator as coordinator_module
from tests.process.conftest import Engine

LATE_S = 0.5


class Writer:
    """Changes the weights ``LATE_S`` after it was asked, as a kernel does that waits in a queue; also its event."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._done = threading.Event()
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        time.sleep(LATE_S)
        with torch.no_grad():
            for parameter in self._module.parameters():
                parameter.add_(torch.ones_like(parameter), alpha=0.05)
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()


class Never:
    def query(self) -> bool:
        return False


def test_a24_a_delayed_writer_is_waited_for_and_a_hanging_one_ends_the_refit(
    start_engine: Callable[..., Engine], model: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine()
    settings = Settings.load(socket_dir=socket_dir, link_s=1.0)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    client = EngineClient.connect(engine.address, settings=settings)
    with Coordinator(source=ModuleSource(module), engines=[client], settings=settings) as coordinator:
        coordinator.refit(1)
        old = engine.logprobs()
        monkeypatch.setattr(coordinator_module, "mark", lambda: Writer(module))
        (report,) = coordinator.refit(2)
        assert report.phases["begin"] >= LATE_S * 0.9
        new = engine.logprobs()
        monkeypatch.setattr(coordinator_module, "mark", lambda: None)
        coordinator.refit(3)
        assert new == engine.logprobs() != old

        monkeypatch.setattr(coordinator_module, "mark", Never)
        with pytest.raises(RefitFailed, match="the GPU has not finished what the trainer asked of it .* within 1 s"):
            coordinator.refit(4)
        assert engine.complete().headers["x-syncstack-version"] == "3"
