"""200 refits in a row leave descriptors, mappings, threads and memory of both processes as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from syncstack import Coordinator, EngineClient, ModuleSource, Settings
from tests.process.conftest import Engine

NUM_REFITS = 200
WARM_UP = 20
"""Refits before the first measurement: caches of allocators and imports fill in these."""

RSS_SLACK_BYTES = 8 << 20
"""Noise of two allocators. One leaked segment of this model per refit would be 200 times 330 kB, or 66 MB."""


def usage(pid: int | str) -> dict[str, int]:
    root = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    return {
        "fds": len(list((root / "fd").iterdir())),
        "mappings": len((root / "maps").read_text().splitlines()),
        "threads": int(status["Threads"]),
        "rss": int(status["VmRSS"].split()[0]) * 1024,
    }


def test_200_refits_leave_no_trace(start_engine: Callable[..., Engine], model: Path, socket_dir: Path) -> None:
    engine = start_engine(profile="restrictive")
    settings = Settings.load(socket_dir=socket_dir)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    client = EngineClient.connect(engine.address, settings=settings)
    with Coordinator(source=ModuleSource(module), engines=[client], settings=settings) as coordinator:
        for version in range(1, WARM_UP + 1):
            coordinator.refit(version)
        before = {"trainer": usage("self"), "engine": usage(engine.process.pid)}
        for version in range(WARM_UP + 1, WARM_UP + NUM_REFITS + 1):
            (report,) = coordinator.refit(version)
            assert report.digests_equal == report.tensors
        after = {"trainer": usage("self"), "engine": usage(engine.process.pid)}
    print(before, after)
    for side, counts in after.items():
        for what in ("fds", "threads"):
            assert counts[what] <= before[side][what] + 2, (side, what, before, after)
        # An allocator may split one arena: a leak of one mapping per refit would be 200.
        assert counts["mappings"] <= before[side]["mappings"] + 10, (side, before, after)
        assert counts["rss"] <= before[side]["rss"] + RSS_SLACK_BYTES, (side, before, after)
