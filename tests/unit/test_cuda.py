"""cuda_fd and cuda_ipc over a real unix socket with a fake driver: what is shown, when, and what is left behind."""

from __future__ import annotations

import gc
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncstack.errors import DigestMismatch, GpuError, HandleRefused, LinkLost, SyncstackError, TransportError
from syncstack.facts import collect
from syncstack.transports.cuda import arena, handover, receiver, shown
from syncstack.transports.cuda.digests import by_host
from syncstack.transports.cuda.driver import Pending
from syncstack.transports.cuda.receiver import CudaReceiver
from syncstack.transports.cuda.sender import BY_FD, BY_IPC, CudaSender
from syncstack.transports.cuda.shown import Shown
from syncstack.transports.host_fd.handover import FdWay
from syncstack.transports.session import LinkServer
from syncstack.transports.staged import StagedVersion
from syncstack.weights.manifest import resolve
from syncstack.weights.meta import ParamMeta
from syncstack.wire.link import Link, greet
from tests.unit.fake_gpu import CHUNK, DEVICE, FakeGpu, tensor_at


class Weights:
    """A trainer's parameters at addresses that the test chooses."""

    resident = True
    """Whether it says that it gathers nothing."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def stays(self) -> bool:
        return self.resident

    def metadata(self) -> Sequence[ParamMeta]:
        return [
            ParamMeta(name=name, dtype=str(one.dtype).removeprefix("torch."), shape=tuple(one.shape))
            for name, one in self.tensors.items()
        ]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class Worker:
    """A worker's end of one link, in a thread; it has a driver of its own, as a process has."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        self.versions: dict[str, StagedVersion] = {}
        ours, theirs = socket.socketpair()
        self.link = Link(theirs)
        self.server = LinkServer(Link(ours), self, link_s=10)
        self.server._by_gpu = CudaReceiver(driver=lambda: self.gpu)
        self._own = self.server._link
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        greet(self.link, role="trainer", rank=0, deadline=time.monotonic() + 5)

    def _serve(self) -> None:
        try:
            greet(self._own, role="worker", rank=0, deadline=time.monotonic() + 5)
            self.server.run()
        except SyncstackError:
            pass
        finally:
            self.server.close()
            self._own.close()

    def register(self, version: StagedVersion) -> None:
        self.versions[version.offer.session] = version

    def drop(self, session: str, share: int | None = None) -> None:
        version = self.versions.pop(session, None)
        if version is not None:
            version.close()

    def end(self) -> None:
        self.link.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


class Pair:
    """A trainer with a fake GPU, and its workers."""

    def __init__(self, kinds: frozenset[str] = BY_FD, workers: int = 1) -> None:
        self.gpu = FakeGpu()
        self.sender = CudaSender(kinds, DEVICE, driver=lambda: self.gpu)  # type: ignore[arg-type]
        self.workers = [Worker() for _ in range(workers)]

    def stage(
        self, source: Weights, want: Sequence[ParamMeta] | None = None, *, way: FdWay = "scm"
    ) -> list[StagedVersion]:
        session = secrets.token_hex(8)
        wanted = resolve(source.metadata(), want or source.metadata(), {})
        links = [worker.link for worker in self.workers]
        ways = dict.fromkeys(links, way)
        self.sender.stage(source, wanted, links, session=session, version=1, wait_s=10, fd_ways=ways)
        return [worker.versions[session] for worker in self.workers]

    def renew(self) -> None:
        """What the coordinator does after a failure: every link is dropped."""
        for worker in self.workers:
            worker.end()
        self.workers = [Worker() for _ in self.workers]

    def end(self) -> None:
        for worker in self.workers:
            worker.end()
        self.sender.close()
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def at(address: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """A float32 tensor in mapped memory."""
    nbytes = 4 * int(torch.Size(shape).numel())
    tensor = tensor_at(address, nbytes).view(torch.float32).view(shape)
    return tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


READ = pytest.mark.parametrize("resident", [True, False], ids=["read-at-once", "gathered"])


def same(version: StagedVersion, source: Weights) -> bool:
    found = dict(version.views())
    return found.keys() == source.tensors.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in source.tensors.items()
    )


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_loader_reads_the_trainers_own_memory_across_chunks() -> None:
    with Pair(workers=2) as pair:
        base = pair.gpu.expandable(5)
        other = pair.gpu.expandable(1)
        source = Weights(
            a=at(base + 256, 3, 5000), b=at(base + 4 * CHUNK - 512, 200), c=at(other, 7), d=torch.empty(0, 3)
        )
        versions = pair.stage(source)
        for version in versions:
            assert same(version, source)
            source.tensors["a"][0, 0] = 42  # without another word
            assert dict(version.views())["a"][0, 0] == 42
            source.tensors["a"].copy_(torch.zeros(3, 5000))
        for worker in pair.workers:
            assert worker.gpu.calls["map"] == 4  # those that hold something
            assert worker.gpu.calls["reserve"] in (2, 3)  # those that adjoin are one; the kernel chose where "c" lies


def test_what_lies_where_it_was_is_not_shown_twice() -> None:
    with Pair() as pair:
        source = Weights(a=at(pair.gpu.expandable(3), 40000))
        (worker,) = pair.workers
        for seed in range(5):
            source.tensors["a"].copy_(torch.randn(40000, generator=torch.Generator().manual_seed(seed)))
            (version,) = pair.stage(source)
            assert same(version, source)
        assert pair.gpu.calls["export_fd"] == worker.gpu.calls["import_fd"] == 3
        newcomer = Worker()
        pair.workers.append(newcomer)
        assert all(same(version, source) for version in pair.stage(source))
        assert worker.gpu.calls["import_fd"] == newcomer.gpu.calls["import_fd"] == 3


def test_other_memory_at_the_same_address_is_noticed() -> None:
    with Pair() as pair:
        base = pair.gpu.expandable(2)
        source = Weights(a=at(base, 20000))
        pair.stage(source)
        pair.gpu.shrink(base)
        pair.gpu.grow(base)
        at(base, 20000, seed=9)
        (version,) = pair.stage(source)
        assert same(version, source)
        assert pair.workers[0].gpu.calls["import_fd"] == 4


def test_a_segment_that_grows_and_moves_is_followed() -> None:
    with Pair() as pair:
        base = pair.gpu.expandable(1, room=3)
        pair.stage(Weights(a=at(base, 100)))
        pair.gpu.grow(base + CHUNK)
        source = Weights(a=at(base, 100), b=at(base + CHUNK - 400, 300))
        (version,) = pair.stage(source)
        assert same(version, source)
        moved = Weights(a=at(pair.gpu.expandable(1), 100, seed=5))
        (version,) = pair.stage(moved)
        assert same(version, moved)
        gc.collect()
        assert pair.workers[0].gpu.open_handles() == 1


def test_cuda_ipc_opens_an_allocation_once_and_copies_what_lies_in_expandable_segments() -> None:
    with Pair(BY_IPC) as pair:
        base = pair.gpu.malloc(1 << 20)
        source = Weights(a=at(base, 300), b=at(base + 4096, 500))
        for _ in range(3):
            (version,) = pair.stage(source)
            assert same(version, source)
        assert pair.workers[0].gpu.calls["open_ipc"] == 1
        other = Weights(a=at(pair.gpu.expandable(1), 3))  # as when the allocator was set to them for a while
        (version,) = pair.stage(other)
        assert same(version, other)
        assert "export_fd" not in pair.gpu.calls


def test_cuda_ipc_says_what_to_do_where_torch_gives_expandable_segments_only() -> None:
    with Pair(BY_IPC) as pair:
        pair.gpu.empty = lambda nbytes, device: tensor_at(pair.gpu.expandable(1), nbytes)  # type: ignore[method-assign]
        with pytest.raises(HandleRefused, match=r"expandable segments, which have no legacy handle.*Next: use cuda_fd"):
            pair.stage(Weights(a=at(pair.gpu.expandable(1), 3)))
        source = Weights(a=at(pair.gpu.malloc(CHUNK), 300))
        assert same(pair.stage(source)[0], source)


def test_memory_that_is_of_another_kind_than_before_ends_one_version_and_not_the_next() -> None:
    with Pair() as pair:
        base = pair.gpu.expandable(1)
        source = Weights(a=at(base, 300))
        assert same(pair.stage(source)[0], source)
        pair.gpu.shrink(base)
        pair.gpu.malloc_at(base, CHUNK)
        source = Weights(a=at(base, 300))
        with pytest.raises(HandleRefused, match=r"plain cudaMalloc memory now, .*Next: run the refit again"):
            pair.stage(source)
        pair.renew()
        assert same(pair.stage(source)[0], source)
        assert pair.gpu.calls["create"] == 1


@READ
def test_plain_memory_is_copied_into_memory_that_can_be_handed_over_and_stays_there(resident: bool) -> None:
    with Pair() as pair:
        base = pair.gpu.malloc(1 << 20)
        source = Weights(a=at(base, 300), b=at(base + 4096, 3, 70000), c=at(pair.gpu.expandable(1), 9))
        source.resident = resident
        for seed in range(3):
            source.tensors["b"].copy_(torch.randn(3, 70000, generator=torch.Generator().manual_seed(seed)))
            (version,) = pair.stage(source)
            assert same(version, source)
        source.tensors["b"].zero_()  # what the worker reads is a copy
        assert dict(version.views())["b"].any()
        assert pair.gpu.calls["create"] == 1
        assert pair.gpu.calls["export_fd"] == pair.workers[0].gpu.calls["import_fd"] == 2
        assert "open_ipc" not in pair.workers[0].gpu.calls
        held = pair.gpu.open_handles()
        pair.sender.retire()
        gc.collect()
        assert pair.gpu.open_handles() < held


def test_large_copies_have_a_piece_each_and_small_ones_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "BLOCK_BYTES", 2 * CHUNK)
    with Pair() as pair:
        base = pair.gpu.malloc(1 << 20)
        sizes = (100, 50000, 200, 300, 20000, 20000)
        source = Weights(**{f"w{index}": at(base + index * (128 << 10), size) for index, size in enumerate(sizes)})
        (version,) = pair.stage(source)
        assert same(version, source)
        assert pair.gpu.calls["create"] == 4
        for name, view in version.views():
            assert view.data_ptr() % 256 == 0, name


def test_no_room_for_a_copy_is_told_with_what_to_do_and_the_next_version_comes() -> None:
    with Pair() as pair:
        pair.gpu.room = 0
        source = Weights(a=at(pair.gpu.malloc(CHUNK), 300))
        with pytest.raises(TransportError, match=r"no room for the copy .*Next: set expandable_segments:True"):
            pair.stage(source)
        assert pair.gpu.reserved == {}
        pair.gpu.room = None
        assert same(pair.stage(source)[0], source)


@READ
def test_a_value_that_cannot_be_read_as_it_lies_gets_a_buffer_that_is_kept(resident: bool) -> None:
    with Pair() as pair:
        base = pair.gpu.expandable(2)
        source = Weights(on_host=torch.randn(50), strided=at(base, 40, 30).t(), cast=at(base + CHUNK, 100))
        source.resident = resident
        want = [
            ParamMeta(name="on_host", dtype="float32", shape=(50,)),
            ParamMeta(name="strided", dtype="float32", shape=(30, 40)),
            ParamMeta(name="cast", dtype="bfloat16", shape=(100,)),
        ]
        for number in range(3):
            source.tensors["cast"].fill_(number)
            (version,) = pair.stage(source, want)
            found = dict(version.views())
            assert torch.equal(found["on_host"], source.tensors["on_host"])
            assert torch.equal(found["strided"], source.tensors["strided"])
            assert torch.equal(found["cast"], source.tensors["cast"].bfloat16())
            assert pair.sender.cast_bytes == 400
        assert pair.workers[0].gpu.calls["import_fd"] == 1  # they lie together


def test_a_write_during_the_load_is_found() -> None:
    with Pair() as pair:
        source = Weights(a=at(pair.gpu.expandable(1), 300))
        (version,) = pair.stage(source)
        version.check_again()
        source.tensors["a"][7] = 1e9
        with pytest.raises(DigestMismatch, match="a was changed while the engine was loading it"):
            version.check_again()
        assert pair.workers[0].gpu.calls["settle"] >= 2


@pytest.mark.parametrize("call", ["import_fd", "reserve", "map", "allow"])
def test_a_call_that_the_workers_driver_refuses_leaves_nothing_and_the_next_version_comes(call: str) -> None:
    fds = num_fds()
    with Pair() as pair:
        source = Weights(a=at(pair.gpu.expandable(3), 40000))
        worker = pair.workers[0].gpu
        worker.fail.append(call)
        with pytest.raises(GpuError, match=rf"{call} failed \(observed: CUDA_ERROR_FAKE\)"):
            pair.stage(source)
        deadline = time.monotonic() + 5
        while worker.open_handles() or worker.reserved:
            assert time.monotonic() < deadline
            gc.collect()
        (version,) = pair.stage(source)
        assert same(version, source)
        del version
    assert num_fds() <= fds + 3  # the chunks that the trainer still has
    assert not worker.open_handles()


def test_what_two_threads_let_go_at_once_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(handover, "close_fds", closed.extend)
    given = handover.Given({}, session="s", wait_s=1)
    given._kept = [1001, 1002]

    class WhileItStarts(threading.Thread):
        def start(self) -> None:
            given.close()
            super().start()
            self.join(5)

    monkeypatch.setattr(handover, "threading", SimpleNamespace(Thread=WhileItStarts))
    given.close()
    assert closed == [1001, 1002]


@pytest.mark.parametrize("call", ["bind", "span", "retain", "export_fd"])
def test_a_call_that_the_trainers_driver_refuses_ends_it_and_nothing_is_held(call: str) -> None:
    with Pair() as pair:
        source = Weights(a=at(pair.gpu.expandable(3), 40000))
        pair.gpu.fail.append(call)
        with pytest.raises(GpuError, match=rf"{call} failed"):
            pair.stage(source)
        deadline = time.monotonic() + 5
        while any(one.held for one in pair.gpu.physical.values()):
            assert time.monotonic() < deadline
        pair.renew()
        (version,) = pair.stage(source)
        assert same(version, source)
    assert not any(one.held for one in pair.gpu.physical.values())


class Busy(Weights):
    """A source that does not return before ``go``."""

    go = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.go.wait(20)
        yield from super().__iter__()


def test_a_worker_that_goes_while_the_source_is_busy_is_noticed_and_what_it_gives_then_goes_nowhere() -> None:
    with Pair() as pair:
        source = Busy(a=at(pair.gpu.expandable(3), 40000))
        threading.Timer(0.2, pair.workers[0]._own.close).start()
        begin = time.monotonic()
        with pytest.raises(LinkLost):
            pair.stage(source)
        assert time.monotonic() - begin < 2
        pair.renew()
        source.go.set()
        (version,) = pair.stage(source)
        assert same(version, source)
        assert [one.held for one in pair.gpu.physical.values()] == [1, 1, 1]
        pair.sender.close()
        assert [one.held for one in pair.gpu.physical.values()] == [0, 0, 0]


def test_a_worker_without_the_device_refuses_by_its_name() -> None:
    with Pair() as pair:
        pair.gpu.device_of = lambda tensor: "GPU-other"  # type: ignore[method-assign]
        pair.gpu.bind = lambda device: None  # type: ignore[method-assign]
        with pytest.raises(HandleRefused, match=f"not visible here .*observed: {DEVICE}.*GPU-other"):
            pair.stage(Weights(a=at(pair.gpu.expandable(1), 3)))


def test_too_few_descriptors_are_said_before_the_first() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Pair() as pair:
        source = Weights(a=at(pair.gpu.expandable(40), 10 * CHUNK))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_fds() + 30, hard))
        try:
            with pytest.raises(TransportError, match=r"the trainer may not open enough descriptors.*32 more.*ulimits"):
                pair.stage(source)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "export_fd" not in pair.gpu.calls
        assert same(pair.stage(source)[0], source)


def num_fds_at_last(expected: int) -> int:
    """After a thread of the sender's has closed what it kept."""
    deadline = time.monotonic() + 5
    while num_fds() > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return num_fds()


@pytest.mark.parametrize("room", [True, False])
def test_three_hundred_chunks_go_in_batches_and_are_kept_only_where_there_is_room(
    room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's fake memory is 300 descriptors; a real one has none."""
    monkeypatch.setattr(handover, "check_descriptors", lambda _, *, side: 300 if room else 299)
    with Pair() as pair:
        source = Weights(a=at(pair.gpu.expandable(300), 300 * CHUNK // 4))
        fds = num_fds()
        most = list[int]()
        export = pair.gpu.export_fd

        def counted(handle: int) -> int:
            most.append(num_fds() - fds)
            return export(handle)

        pair.gpu.export_fd = counted  # type: ignore[method-assign]
        (version,) = pair.stage(source)
        assert same(version, source)
        del version
        assert num_fds_at_last(fds + 300) == fds + 300
        assert len(most) == 300
        assert (max(most) > 300 + 3 * handover.BATCH) == room


@pytest.mark.skipif(
    collect().syscalls["pidfd_getfd"].verdict != "ok", reason="pidfd_getfd is not allowed here, which is the rule"
)
def test_descriptors_can_be_fetched_and_stay_open_until_they_were() -> None:
    with Pair(workers=2) as pair:
        source = Weights(a=at(pair.gpu.expandable(300), 300 * CHUNK // 4))
        fds = num_fds()
        for version in pair.stage(source, way="pidfd"):
            assert same(version, source)
        assert num_fds_at_last(fds + 600) == fds + 600  # those of the workers' fake memory
        worker = pair.workers[1].gpu
        pair.gpu.shrink(source.tensors["a"].data_ptr())
        pair.gpu.grow(source.tensors["a"].data_ptr())
        worker.fail.append("map")
        fds = num_fds()
        with pytest.raises(GpuError):
            pair.stage(source, way="pidfd")
        pair.renew()
        gc.collect()
        assert num_fds_at_last(fds) <= fds


def test_a_link_that_ends_unmaps_everything_but_what_a_loader_holds() -> None:
    pair = Pair()
    source = Weights(a=at(pair.gpu.expandable(2), 20000))
    (version,) = pair.stage(source)
    views = version.views()
    _, held = next(views)
    worker = pair.workers[0]
    worker.end()
    with pytest.raises(LinkLost):
        list(version.views())
    del version, views
    gc.collect()
    assert torch.equal(held, source.tensors["a"])
    assert worker.gpu.open_handles() == 2
    del held
    worker.versions.clear()
    gc.collect()
    assert not worker.gpu.open_handles()
    assert not worker.gpu.reserved
    pair.sender.close()


def test_the_end_of_the_process_waits_for_a_thread_that_unmaps(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        pair.stage(Weights(a=at(pair.gpu.expandable(3), 40000)))
        worker = pair.workers[0]
        worker.versions.clear()
        begun = threading.Event()

        def slow(device: str) -> None:
            begun.set()
            time.sleep(0.3)

        monkeypatch.setattr(worker.gpu, "settle", slow)
        pair.workers[0].link.end()
        assert begun.wait(5)
        receiver._close_all()
        assert not worker.gpu.reserved


def test_two_hundred_versions_leave_nothing() -> None:
    with Pair() as pair:
        bases = [pair.gpu.expandable(2) for _ in range(3)]
        before = 0
        for number in range(220):
            source = Weights(**{f"w{i}": at(base + 64 * i, 5000, seed=number) for i, base in enumerate(bases)})
            (version,) = pair.stage(source)
            pair.workers[0].drop(version.offer.session)
            del version
            if not number % 10:  # the trainer's allocator moves on
                pair.gpu.shrink(bases[0])
                pair.gpu.grow(bases[0])
            if number == 20:
                gc.collect()
                before = num_fds()
        gc.collect()
        assert num_fds() <= before + 1
        assert pair.workers[0].gpu.open_handles() <= 7


def test_copies_are_one_launch_and_with_gathered_values_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "PENDING_BYTES", 3000)
    copied: list[int] = []

    class Counting(type(by_host)):  # type: ignore[misc]
        def copy(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> Pending:
            copied.append(len(tensors))
            return super().copy(tensors, places)  # type: ignore[no-any-return]

    with Pair() as pair:
        pair.sender._shown._make_digester = lambda device: Counting()
        base = pair.gpu.malloc(1 << 20)
        source = Weights(**{f"w{number}": at(base + 4096 * number, 300) for number in range(6)})  # 1200 bytes each
        for resident, launches in ((True, [6]), (False, [3, 3]), (True, [6]), (True, [6])):
            source.resident = resident
            source.tensors["w4"].add_(1)
            copied.clear()
            assert same(pair.stage(source)[0], source)
            assert copied == launches


def test_a_version_that_lies_otherwise_than_the_last_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        base, other = pair.gpu.malloc(1 << 20), pair.gpu.malloc(1 << 20)
        source = Weights(a=at(base, 300), b=at(base + 4096, 20, 10))
        looks: list[object] = []
        one = Shown._looked_at

        def counted(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            looks.append(1)
            return one(*args, **kwargs)

        monkeypatch.setattr(Shown, "_looked_at", counted)

        def looked(want: Sequence[ParamMeta] | None = None) -> bool:
            looks.clear()
            (version,) = pair.stage(source, want)
            found = dict(version.views())
            assert all(torch.equal(found[name], one) for name, one in source.tensors.items())
            return bool(looks)

        assert (looked(), looked()) == (True, False)
        source.tensors["a"] = at(other, 300, seed=4)
        assert (looked(), looked()) == (True, False)
        source.tensors["b"] = at(base + 4096, 10, 20).t()
        assert (looked(), looked()) == (True, False)  # of the same shape, in another order
        pair.sender.retire()
        assert (looked(), looked()) == (True, False)
        cast = [ParamMeta(name="a", dtype="bfloat16", shape=(300,)), source.metadata()[1]]
        source.tensors["a"] = source.tensors["a"].bfloat16().float()
        assert looked(cast)


Step = st.sampled_from(
    ["write", "replace", "grow", "shrink", "more", "fewer", "fail", "newcomer", "malloc", "free", "gather"]
)


class Allocator:
    """What a trainer's allocator may do between two versions, at random."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.segments = [(pair.gpu.expandable(2, room=30), 2)]
        self.plain: list[int] = []
        self.resident = True

    def do(self, step: str) -> None:
        gpu, (base, chunks) = self.pair.gpu, self.segments[-1]
        if step == "replace":
            gpu.shrink(base)
            gpu.grow(base)
        elif step == "grow":
            gpu.grow(base + chunks * CHUNK)
            self.segments[-1] = (base, chunks + 1)
        elif step == "shrink" and chunks > 1:
            gpu.shrink(base + (chunks - 1) * CHUNK)
            self.segments[-1] = (base, chunks - 1)
        elif step == "more":
            self.segments.append((gpu.expandable(1, room=30), 1))
        elif step == "fewer" and len(self.segments) > 1:
            self.segments.pop(0)
        elif step == "newcomer" and len(self.pair.workers) < 3:
            self.pair.workers.append(Worker())
        elif step == "malloc":
            self.plain.append(gpu.malloc(CHUNK))
        elif step == "free" and self.plain:
            self.plain.pop(0)
        elif step == "gather":
            self.resident = not self.resident

    def weights(self, seed: int) -> Weights:
        lying = {f"w{base}": at(base, chunks * CHUNK // 4, seed=seed) for base, chunks in self.segments}
        source = Weights(**lying, **{f"p{base}": at(base, 2000, seed=seed) for base in self.plain})
        source.resident = self.resident
        return source


@settings(max_examples=30, deadline=None)
@given(st.lists(Step, max_size=12))
def test_whatever_the_allocator_does_a_loader_never_reads_stale_memory(steps: list[str]) -> None:
    with Pair() as pair:
        allocator = Allocator(pair)
        for number, step in enumerate(["write", *steps]):
            allocator.do(step)
            source = allocator.weights(number)
            if step == "fail":
                pair.workers[0].gpu.fail.append("map")
                pair.sender.retire()
                with pytest.raises(GpuError):
                    pair.stage(source)
                pair.renew()
            for version in pair.stage(source):
                assert same(version, source)
                version.check_again()
