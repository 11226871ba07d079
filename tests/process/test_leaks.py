"""1000 refits in a row leave descriptors, mappings, threads and memory of both processes as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from syncstack import Coordinator, EngineClient, ModuleSource, Settings
from tests.process.conftest import Engine
from tests.process.test_tcp import address_of

NUM_REFITS = 1000
TOKEN = "0123456789abcdef" * 4

WARM_UP = 20
"""Refits before the first measurement: caches of allocators and imports fill in these."""

RSS_SLACK_BYTES = 32 << 20
"""What an allocator takes back and gives up as it likes: a process that ran other tests before has much of it. A
tenth of this model leaked by each refit would be more."""


def usage(pid: int | str) -> dict[str, int]:
    root = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    return {
        "fds": len(list((root / "fd").iterdir())),
        "mappings": len((root / "maps").read_text().splitlines()),
        "threads": int(status["Threads"]),
        "rss": int(status["VmRSS"].split()[0]) * 1024,
    }


def start(layout: str, start_engine: Callable[..., Engine]) -> list[Engine]:
    """One engine that shares a folder with the trainer, or two that share nothing with it."""
    if layout == "colocated":
        return [start_engine(profile="restrictive")]
    env = {"SYNCSTACK_LISTEN": "tcp://127.0.0.1:0", "SYNCSTACK_TOKEN": TOKEN}
    return [start_engine(profile="restrictive", env=env, name=name) for name in ("engine-0", "engine-1")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("layout", "transport"), [("colocated", "host_fd"), ("disagg", "collective")])
def test_1000_refits_leave_no_trace(
    start_engine: Callable[..., Engine], model: Path, socket_dir: Path, layout: str, transport: str
) -> None:
    engines = start(layout, start_engine)
    settings = Settings.load(socket_dir=socket_dir, transport=transport, token=TOKEN)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    addresses = [engine.address if layout == "colocated" else address_of(engine) for engine in engines]
    clients = [EngineClient.connect(address, settings=settings) for address in addresses]

    def counts() -> dict[str, dict[str, int]]:
        return {
            "trainer": usage("self"),
            **{client.name: usage(e.process.pid) for client, e in zip(clients, engines, strict=True)},
        }

    with Coordinator(source=ModuleSource(module), engines=clients, settings=settings) as coordinator:
        for version in range(1, WARM_UP + 1):
            coordinator.refit(version)
        before = counts()
        for version in range(WARM_UP + 1, WARM_UP + NUM_REFITS + 1):
            for report in coordinator.refit(version):
                assert (report.transport, report.digests_equal) == (transport, report.tensors)
        after = counts()
    print(before, after)
    for side, found in after.items():
        for what in ("fds", "threads"):
            assert found[what] <= before[side][what] + 2, (side, what, before, after)
        # An allocator may split one arena: a leak of one mapping per refit would be 1000.
        assert found["mappings"] <= before[side]["mappings"] + 10, (side, before, after)
        assert found["rss"] <= before[side]["rss"] + RSS_SLACK_BYTES, (side, before, after)
