"""Page-locked memory: every registration has its end, whatever the driver answers. The driver is a fake here; the GPU
tests at the end ask a real one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from syncstack.errors import TransportError
from syncstack.transports import pinned
from syncstack.transports.host_fd.segment import HEADER_BYTES, SenderSegment
from syncstack.transports.pinned import DriverRegistrar, PinnedRange

REFUSED = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class FakeRegistrar:
    """Keeps the driver's table: an address can be registered once, and released only if it is."""

    def __init__(self, *answers: int) -> None:
        self.table: dict[int, int] = {}
        self.calls: list[str] = []
        self._answers = list(answers)

    def register(self, address: int, nbytes: int) -> int:
        self.calls.append("register")
        code = self._answers.pop(0) if self._answers else 0
        if not code and address in self.table:
            code = pinned.ALREADY_REGISTERED
        if not code:
            self.table[address] = nbytes
        return code

    def unregister(self, address: int) -> int:
        self.calls.append("unregister")
        return 0 if self.table.pop(address, None) else 713


def test_b10_register_drop_register() -> None:
    driver = FakeRegistrar()
    for _ in range(2):
        segment = SenderSegment(8192)
        segment.pin(lambda: driver)
        segment.pin(lambda: driver)
        assert segment.unpinned == ""
        assert list(driver.table.values()) == [HEADER_BYTES + 8192]
        segment.close()
        segment.close()
        assert not driver.table
    assert driver.calls == ["register", "unregister"] * 2


def test_b10_what_somebody_left_registered_at_the_address_is_replaced() -> None:
    driver = FakeRegistrar()
    driver.table[4096] = 77
    held = PinnedRange(4096, 8192, driver)
    assert driver.table == {4096: 8192}
    held.close()
    assert driver.calls == ["register", "unregister", "register", "unregister"]


def test_b10_an_error_in_the_middle_releases_what_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 4096)
    driver = FakeRegistrar(0, 0, REFUSED)
    with pytest.raises(TransportError, match=r"does not page-lock .* cuMemHostRegister of 16384 bytes: CUresult 2"):
        PinnedRange(4096, 16384, driver)
    assert not driver.table
    assert driver.calls == ["register"] * 3 + ["unregister"] * 2


def test_b11_large_memory_is_registered_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinned.CHUNK_BYTES < 512 << 30
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 4096)
    driver = FakeRegistrar()
    held = PinnedRange(8192, 10000, driver)
    assert driver.table == {8192: 4096, 12288: 4096, 16384: 1808}
    held.close()
    assert not driver.table


def test_b11_a_refusal_is_one_warning_and_the_segment_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeRegistrar(REFUSED)
    segment = SenderSegment(4096)
    with caplog.at_level(logging.WARNING):
        segment.pin(lambda: driver)
        segment.pin(lambda: driver)
    assert "CUresult 2" in (segment.unpinned or "")
    assert [record.message for record in caplog.records] == [
        f"weights leave the GPU through memory that is not page-locked, which is slower: {segment.unpinned}"
    ]
    assert driver.calls == ["register"]
    segment.data[:4] = b"good"
    segment.close()
    assert driver.calls == ["register"]


def test_a_release_that_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeRegistrar()
    held = PinnedRange(4096, 4096, driver)
    driver.table.clear()
    held.close()
    assert "was not released: CUresult 713" in caplog.text


def test_several_writers_pin_once_and_a_closed_segment_never() -> None:
    driver, segment = FakeRegistrar(), SenderSegment(4096)
    go = threading.Barrier(4)

    def write() -> None:
        go.wait(10)
        segment.pin(lambda: driver)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    segment.close()
    segment.pin(lambda: driver)
    closed = SenderSegment(4096)
    closed.close()
    closed.pin(lambda: driver)
    assert driver.calls == ["register", "unregister"]


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="says what happens where there is no NVIDIA driver")
def test_without_bindings_or_driver_it_is_a_reason_and_no_crash() -> None:
    segment = SenderSegment(4096)
    segment.pin(lambda: DriverRegistrar(0))
    assert segment.unpinned
    segment.close()


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs an NVIDIA GPU")
class TestOnTheGpu:
    def test_b10_twice_on_the_same_memory(self) -> None:
        for _ in range(3):
            segment = SenderSegment(64 << 20)
            segment.pin(lambda: DriverRegistrar(0))
            assert segment.unpinned == ""
            assert torch.frombuffer(segment.data, dtype=torch.uint8).is_pinned()
            segment.close()

    def test_b11_a_refusal_leaves_no_error_for_the_next_kernel(self) -> None:
        address = torch.empty(4096, dtype=torch.uint8).data_ptr()
        held = PinnedRange(address, 4096, DriverRegistrar(0))
        assert DriverRegistrar(0).register(address, 4096) == pinned.ALREADY_REGISTERED
        held.close()
        assert int(torch.ones(3, device="cuda").sum()) == 3
        torch.cuda.synchronize()

    def test_it_is_faster(self) -> None:
        source = torch.randint(0, 255, (512 << 20,), dtype=torch.uint8, device="cuda")
        segment = SenderSegment(source.nbytes)
        target = torch.frombuffer(segment.data, dtype=torch.uint8)
        before = timed(lambda: target.copy_(source))
        segment.pin(lambda: DriverRegistrar(0))
        after = timed(lambda: target.copy_(source))
        print(f"512 MiB from the GPU: {before * 1e3:.1f} ms, page-locked {after * 1e3:.1f} ms")
        assert torch.equal(target, source.cpu())
        assert after < before / 1.5
        segment.close()


def timed(call: Callable[[], object]) -> float:
    """Seconds of the fastest of five calls."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)
