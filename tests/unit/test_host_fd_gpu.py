"""host_fd from weights on a real GPU: in order, to the bit, through page-locked memory, and nothing left behind."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from syncstack.errors import DigestMismatch
from syncstack.transports.endpoint import WorkerEndpoint
from syncstack.transports.host_fd.d2h import STEP_BYTES
from syncstack.transports.host_fd.receiver import VersionByGpu
from syncstack.transports.host_fd.sender import HostFdSender
from syncstack.transports.order import await_done, mark
from syncstack.transports.staged import StagedVersion
from syncstack.weights.manifest import resolve
from syncstack.weights.source import ModuleSource
from syncstack.wire import unix
from syncstack.wire.link import Link, greet
from syncstack.wire.messages import BucketReady, Message

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs an NVIDIA GPU"),
]


class Pair:
    """A trainer and a worker of one process, over a real unix socket."""

    def __init__(self, folder: Path, device: str = "cuda:0") -> None:
        """``device`` is where the engine's weights lie."""
        where = torch.device(device)
        self.endpoint = WorkerEndpoint(folder / "worker-0.sock", rank=0, link_s=30, device=lambda: where)
        self.link = Link(unix.connect(folder / "worker-0.sock", deadline=time.monotonic() + 5))
        greet(self.link, role="trainer", rank=0, deadline=time.monotonic() + 5)
        self.sender = HostFdSender(bucket_bytes=64 << 20)

    def stage(self, module: torch.nn.Module) -> StagedVersion:
        source, session = ModuleSource(module), secrets.token_hex(8)
        metas = source.metadata()
        self.sender.stage(source, resolve(metas, metas, {}), [self.link], session=session, version=1, wait_s=60)
        return self.endpoint.take(session)

    def close(self) -> None:
        self.link.close()
        self.sender.close()
        self.endpoint.close()


@pytest.fixture(params=["cuda:0", "cpu"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(tmp_path, request.param)
    yield made
    made.close()


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.nn.ParameterList:
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    return torch.nn.ParameterList([torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors])


def test_every_bit_arrives_through_page_locked_memory(pair: Pair) -> None:
    module = weights((3000, 700), (), (0, 4), (5,), (7, 11, 13))
    module.append(torch.nn.Parameter(torch.randn(50, 40, device="cuda").t(), requires_grad=False))
    found = dict(pair.stage(module).views())
    assert pair.sender.unpinned == ""
    for name, parameter in module.named_parameters():
        assert torch.equal(found[name], parameter.cpu())


def test_the_worker_reads_a_large_tensor_before_its_end_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, told = Pair(tmp_path), list[int]()
    send = Link.send

    def seen(link: Link, message: Message, **options: Any) -> None:
        told.extend([message.readable] if isinstance(message, BucketReady) and message.readable else ())
        send(link, message, **options)

    monkeypatch.setattr(Link, "send", seen)
    module = weights((3, 5), (100 << 20,), (70_000,))  # 200 MiB between small ones
    version = pair.stage(module)
    slot = version.tensors[1]
    assert told == [slot.offset + min(reached * STEP_BYTES, slot.nbytes) for reached in (1, 2, 3, 4)]
    assert torch.equal(dict(version.views())["1"], module[1].cpu())
    version.check_again()
    pair.close()


def test_a24_a_kernel_that_is_late_is_waited_for(pair: Pair) -> None:
    """And without the wait the old values would travel: the test can fail."""
    module = weights((1 << 20,))
    module[0].zero_()
    pair.stage(module)
    torch.cuda.synchronize()
    for waits, expected in ((False, 0.0), (True, 2.0)):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(1_500_000_000)
            module[0].fill_(2.0)
            if waits:
                await_done(mark(), wait_s=30)
            found = dict(pair.stage(module).views())["0"]
            assert found.unique().tolist() == [expected]
            del found
        torch.cuda.synchronize()
        module[0].zero_()
        torch.cuda.synchronize()


def test_a_hundred_versions_leave_nothing(pair: Pair) -> None:
    module = weights(*[(1024, 1024)] * 8)
    counts = []
    for number in range(110):
        module[0].fill_(number)
        await_done(mark(), wait_s=30)
        assert dict(pair.stage(module).views())["0"][0, 0].item() == number
        if number % 100 == 9:
            maps = len(Path("/proc/self/maps").read_text().splitlines())
            counts.append((len(os.listdir("/proc/self/fd")), maps, torch.cuda.mem_get_info()[0]))
    before, after = counts
    assert after[0] == before[0]
    assert after[1] <= before[1] + 5
    assert after[2] >= before[2] - (2 << 20)


def test_the_workers_gpu_verifies_and_finds_what_was_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(tmp_path)
    module = weights((40 << 20,), (3, 5), (70_000,), (9 << 20,))
    version = pair.stage(module)
    assert isinstance(version, VersionByGpu)
    version.check_again()
    segment = pair.sender._segment
    assert segment is not None
    segment.data[-7_000_000] ^= 1
    with pytest.raises(DigestMismatch, match=r"^3 was changed while the engine was loading it"):
        version.check_again()
    assert not caplog.records
    pair.close()


def test_how_fast_it_is(pair: Pair) -> None:
    """A number, not a limit: 2 GiB from the GPU to the worker's digests, beside one copy into pinned memory."""
    module = weights(*[(8192, 8192)] * 16)
    pinned = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {"copy": [], "host_fd": []}
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        pinned.copy_(flat)
        torch.cuda.synchronize()
        times["copy"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        pair.stage(module)
        times["host_fd"].append(time.perf_counter() - begin)
    print({name: [round(one * 1e3, 1) for one in found] for name, found in times.items()})
    assert min(times["host_fd"][1:]) < times["host_fd"][0]
