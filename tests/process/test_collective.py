"""Whole stages by ``collective`` between real processes: the chain, and whatever may go wrong at each of its places."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from syncstack import Coordinator, EngineClient, ModuleSource, Settings
from syncstack.errors import DeadlineExceeded, DigestMismatch, GroupLost, LinkLost, ProtocolError, TransportError
from syncstack.transports.collective.sender import CollectiveSender
from syncstack.transports.stream.sender import StreamSender
from syncstack.wire.messages import Cast, Fault, Handle, Join, Offer
from tests.process.conftest import Engine
from tests.process.peer import SLOT
from tests.process.test_leaks import RSS_SLACK_BYTES, TOKEN, start, usage
from tests.process.test_stream import MIB, SHAPES, Source, Worker, digests_of, stage, start_worker
from tests.process.test_tcp import address_of

__all__ = ["start_worker"]  # a fixture

Start = Callable[..., Worker]

LARGE = [(64, MIB)]
"""256 MiB: more than the buffers of a few sockets."""

AT_ONCE_S = 5.0


@pytest.fixture
def sender() -> Iterator[CollectiveSender]:
    found = CollectiveSender(bucket_bytes=MIB)
    yield found
    found.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_every_loader_gets_what_the_source_gave(
    start_worker: Start, sender: CollectiveSender, num: int, dtype: str
) -> None:
    workers, source = [start_worker() for _ in range(num)], Source(SHAPES)
    links = [worker.link() for worker in workers]
    for number in range(3):
        source.seed, source.read = number, 0
        stage(sender, source, *links, session=f"session-{number}", dtype=dtype)
        assert source.read == 1
        expected = digests_of(source, dtype)
        assert [worker.ask("views", f"session-{number}") for worker in workers] == [expected] * num
    source = Source([(3 * MIB,), (0,), (), (MIB + 1,)])  # pieces of one tensor and of several
    stage(sender, source, *links, session="session-9", dtype=dtype)
    assert [worker.ask("views", "session-9") for worker in workers] == [digests_of(source, dtype)] * num


def test_c01_the_trainers_default_group_is_untouched(start_worker: Start, sender: CollectiveSender) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = dist.distributed_c10d._world.pg_map.copy()
        stage(sender, Source(SHAPES), start_worker().link(), start_worker().link(), session="session-1")
        assert dist.distributed_c10d._world.pg_map == before
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_workers_come_and_go_between_versions(start_worker: Start, sender: CollectiveSender) -> None:
    workers = [start_worker() for _ in range(3)]
    links = [worker.link() for worker in workers]
    for number, members in enumerate(([0], [0, 1, 2], [2, 0], [1], [0, 1])):
        source = Source(SHAPES, seed=number)
        stage(sender, source, *(links[member] for member in members), session=f"session-{number}")
        for member in members:
            assert workers[member].ask("views", f"session-{number}") == digests_of(source)
    streams = StreamSender(bucket_bytes=MIB)
    source = Source(SHAPES, seed=77)
    stage(streams, source, *links, session="session-77")  # the same links, another way
    streams.close()
    assert [worker.ask("views", "session-77") for worker in workers] == [digests_of(source)] * 3
    stage(sender, source, *links, session="session-78")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_worker_that_dies_is_noticed_at_once(start_worker: Start, sender: CollectiveSender, place: int) -> None:
    workers, source = [start_worker() for _ in range(3)], Source(SHAPES, hold=8)
    links = [worker.link() for worker in workers]
    threading.Thread(target=lambda: source.asked.wait(10) and workers[place].process.kill()).start()
    begin = time.monotonic()
    with pytest.raises((LinkLost, GroupLost)):
        stage(sender, source, *links, session="session-1")
    assert time.monotonic() - begin < AT_ONCE_S
    assert [link.lost() for link in links] == [number == place for number in range(3)]
    source.go.set()
    next_version(sender, workers, without=place)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_worker_that_stops_meets_the_deadline(start_worker: Start, sender: CollectiveSender, place: int) -> None:
    workers = [start_worker() for _ in range(3)]
    links = [worker.link() for worker in workers]
    stage(sender, Source(SHAPES), *links, session="session-0")
    workers[place].process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises((DeadlineExceeded, GroupLost)):
        stage(sender, Source(LARGE), *links, session="session-1", wait_s=1.0)
    assert time.monotonic() - begin < 3 * AT_ONCE_S
    next_version(sender, workers, without=place)


def next_version(sender: CollectiveSender, workers: list[Worker], *, without: int) -> None:
    """The others take another version, over new links as after every failure."""
    left = [worker for number, worker in enumerate(workers) if number != without]
    source = Source(SHAPES, seed=5)
    stage(sender, source, *(worker.link() for worker in left), session="session-5")
    assert [worker.ask("views", "session-5") for worker in left] == [digests_of(source)] * len(left)


def test_a_worker_that_cannot_join_is_told_of(start_worker: Start, sender: CollectiveSender) -> None:
    workers = [start_worker(), start_worker()]
    workers[1].process.send_signal(signal.SIGSTOP)
    links = [workers[0].link()]
    stage(sender, Source(SHAPES), *links, session="session-0")
    workers[1].process.send_signal(signal.SIGCONT)
    links.append(workers[1].link())
    workers[1].process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="waiting for a message"):
        stage(sender, Source(SHAPES), *links, session="session-1", wait_s=1.0)
    assert time.monotonic() - begin < AT_ONCE_S
    workers[0].process.send_signal(signal.SIGCONT)


def test_what_a_worker_passes_on_is_verified_behind_it(start_worker: Start, sender: CollectiveSender) -> None:
    workers = [start_worker(), start_worker("flips"), start_worker()]
    links = [worker.link() for worker in workers]
    with pytest.raises(DigestMismatch, match="arrived with another content.*kept its old weights"):
        stage(sender, Source(SHAPES), *links, session="session-1")
    next_version(sender, workers, without=1)


def test_a_refusal_is_heard_while_the_source_is_busy(start_worker: Start, sender: CollectiveSender) -> None:
    source = Source(SHAPES, hold=1)
    workers = [start_worker(), start_worker("raises")]
    links = [worker.link() for worker in workers]
    begin = time.monotonic()
    with pytest.raises(TransportError, match="refused what it was sent: RuntimeError: broken while"):
        stage(sender, source, *links, session="session-1")
    assert time.monotonic() - begin < 2.0
    source.go.set()
    next_version(sender, workers, without=1)


def test_a_trainer_that_dies_leaves_workers_that_serve(start_worker: Start, sender: CollectiveSender) -> None:
    workers, source = [start_worker(), start_worker()], Source(SHAPES, hold=8)
    links = [worker.link() for worker in workers]
    threading.Thread(target=lambda: source.asked.wait(10) and [link.close() for link in links]).start()
    with pytest.raises((TransportError, LinkLost)):
        stage(sender, source, *links, session="session-1")
    source.go.set()
    other = CollectiveSender(bucket_bytes=MIB)
    stage(other, Source(SHAPES), *(worker.link() for worker in workers), session="session-2")
    other.close()


def test_a_group_needs_links_over_tcp(start_worker: Start, sender: CollectiveSender) -> None:
    worker = start_worker()
    with pytest.raises(TransportError, match="over TCP.*a unix socket"):
        stage(sender, Source(SHAPES), worker.link("unix"), session="session-1")


@pytest.mark.parametrize("what", ["cast", "place", "unix", "stream"])
def test_messages_out_of_place_are_refused(start_worker: Start, what: str) -> None:
    """A worker that is told nonsense says so, ends that session, and takes the next."""
    worker = start_worker()
    link = worker.link("unix" if what == "unix" else "tcp")
    deadline = time.monotonic() + 10
    kind = "stream" if what == "stream" else "group"
    offer = Offer(
        session="session-1",
        version=1,
        segment="0" * 32,
        segment_bytes=4096,
        generation=0,
        handle=Handle(kind=kind),
        tensors=(SLOT,),
    )
    link.send(offer, deadline=deadline)
    if what == "cast":
        link.send(Cast(session="session-1", nbytes=64), deadline=deadline)
    else:
        link.send(Join(session="session-1", place=2 if what == "place" else 1, size=2), deadline=deadline)
    answer, _ = link.receive(deadline=deadline)
    assert isinstance(answer, Fault)
    assert answer.kind == ProtocolError.__name__
    sender = StreamSender(bucket_bytes=MIB)
    stage(sender, Source(SHAPES), link, session="session-2")
    sender.close()


def test_fifty_versions_and_ten_groups_leave_no_trace(start_worker: Start, sender: CollectiveSender) -> None:
    workers, source = [start_worker(), start_worker()], Source(SHAPES)
    links = [worker.link() for worker in workers]
    before: list[dict[str, int]] = []

    def counts() -> list[dict[str, int]]:
        return [usage("self"), *(usage(worker.process.pid) for worker in workers)]

    for number in range(90):
        if number == 40:
            before = counts()
        if not number % 5:
            links.reverse()  # another order is another group
        source.seed = number
        stage(sender, source, *links, session=f"session-{number}")
        for worker in workers:
            worker.ask("finish", f"session-{number}")
    after = counts()
    for side in range(3):
        for what, slack in (("fds", 1), ("threads", 1), ("mappings", 10), ("rss", RSS_SLACK_BYTES)):
            assert after[side][what] <= before[side][what] + slack, (side, what, before, after)


def test_a_group_that_broke_between_two_refits_is_made_anew(
    start_engine: Callable[..., Engine], model: Path, socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a connection is dropped that nobody has used for long."""
    engines = start("disagg", start_engine)
    settings = Settings.load(socket_dir=socket_dir, token=TOKEN)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    clients = [EngineClient.connect(address_of(engine), settings=settings) for engine in engines]
    with Coordinator(source=ModuleSource(module), engines=clients, settings=settings) as coordinator:
        for version in (1, 2, 3):
            reports = coordinator.refit(version)
            assert [report.transport for report in reports] == ["collective"] * 2
            sender = coordinator._staging._sender
            assert isinstance(sender, CollectiveSender)
            assert sender._group is not None
            sender._group.close()
    again = [record.getMessage() for record in caplog.records if "another group" in record.getMessage()]
    assert [line.partition(":")[0] for line in again] == ["stage of version 2", "stage of version 3"]
    for engine in engines:
        assert engine.complete().headers["x-syncstack-version"] == "3"
