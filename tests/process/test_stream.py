"""Whole stages by ``stream`` between real processes: over unix and TCP, and whatever may go wrong on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from syncstack.errors import DeadlineExceeded, DigestMismatch, LinkLost, TransportError
from syncstack.transports.stream.sender import StreamSender
from syncstack.weights.digest import digest
from syncstack.weights.manifest import Wanted
from syncstack.weights.meta import ParamMeta
from syncstack.wire import tcp, unix
from syncstack.wire.auth import Token, prove_as_trainer
from syncstack.wire.link import Link, greet
from syncstack.wire.messages import Fault, Handle, Offer
from syncstack.wire.tcp import Address
from tests.process.conftest import REPO, environment
from tests.process.peer import SECRET, SLOT
from tests.process.test_leaks import RSS_SLACK_BYTES, usage
from tests.process.warm import Warm, WarmProcess

WAYS = pytest.mark.parametrize("way", ["unix", "tcp"])
MIB = 1 << 20


class Worker:
    """``stream_peer.py`` in a process of its own, and links to it."""

    def __init__(self, warm: Warm, *mode: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        os.chmod(self._folder.name, 0o700)
        script = REPO / "tests" / "process" / "stream_peer.py"
        env = environment(Path(self._folder.name))
        self.process = WarmProcess(warm, script, [self._folder.name, *mode], env=env)
        self.port = int(self.process.stdout.readline())
        self._links: list[Link] = []

    def link(self, way: str = "tcp", port: int | None = None) -> Link:
        deadline = time.monotonic() + 10
        if way == "unix":
            link = Link(unix.connect(Path(self._folder.name) / "worker-0.sock", deadline=deadline))
        else:
            link = Link(tcp.connect(Address("127.0.0.1", port or self.port), deadline=deadline))
            prove_as_trainer(link, Token(SECRET), rank=0, worker=0, deadline=deadline)
        self._links.append(link)
        greet(link, role="trainer", rank=0, deadline=deadline)
        return link

    def ask(self, command: str, session: str = "") -> dict[str, str]:
        self.process.stdin.write(f"{command} {session}\n")
        self.process.stdin.flush()
        found: dict[str, str] = json.loads(self.process.stdout.readline())
        return found

    def stop(self) -> None:
        for link in self._links:
            link.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.process.communicate(timeout=20)
        self._folder.cleanup()


@pytest.fixture
def start_worker(warm: Warm) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(*mode: str) -> Worker:
        workers.append(Worker(warm, *mode))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@pytest.fixture
def sender() -> Iterator[StreamSender]:
    found = StreamSender(bucket_bytes=MIB)
    yield found
    found.close()


class Source:
    """Gives new tensors each time, made from ``seed``; stops before tensor ``hold`` until ``go``."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], *, seed: int = 0, hold: int | None = None) -> None:
        self.shapes, self.seed, self.hold = shapes, seed, hold
        self.go, self.asked = threading.Event(), threading.Event()
        self.read = 0
        self.alive = self.most_alive = 0

    def metadata(self) -> Sequence[ParamMeta]:
        return [ParamMeta(name=f"w{i}", dtype="float32", shape=shape) for i, shape in enumerate(self.shapes)]

    def aliases(self) -> dict[str, str]:
        return {}

    def tensor(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + number)
        return torch.randn(self.shapes[number], generator=generator)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.read += 1
        for number in range(len(self.shapes)):
            if number == self.hold:
                self.asked.set()
                self.go.wait(60)
            tensor = self.tensor(number)
            self.alive += 1
            self.most_alive = max(self.most_alive, self.alive)
            weakref.finalize(tensor.untyped_storage(), self._freed)
            yield f"w{number}", tensor

    def _freed(self) -> None:
        self.alive -= 1


def wanted_of(source: Source, dtype: str = "float32") -> list[Wanted]:
    metas = [ParamMeta(name=meta.name, dtype=dtype, shape=meta.shape) for meta in source.metadata()]
    return [Wanted(meta=meta, source=meta.name) for meta in metas]


def digests_of(source: Source, dtype: str = "float32") -> dict[str, str]:
    values = {f"w{i}": source.tensor(i).to(getattr(torch, dtype)) for i in range(len(source.shapes))}
    return {name: digest(value.reshape(-1).view(torch.uint8).numpy()) for name, value in values.items()}


def stage(
    sender: StreamSender, source: Source, *links: Link, session: str, wait_s: float = 20.0, dtype: str = "float32"
) -> None:
    wanted = wanted_of(source, dtype)
    _, staged = sender.stage(source, wanted, links, session=session, version=1, wait_s=wait_s)
    assert [each.digests_equal for each in staged] == [len(wanted)] * len(links)


SHAPES = [(3, 5), (), (0, 7), (1 << 20,), *[(256, 300)] * 12, (7,)]
"""Small, a number, an empty one, one of 4 MiB that its neighbours push over a piece's bounds, and many."""


@WAYS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_d01_d08_the_loader_gets_what_the_source_gave(
    start_worker: Callable[..., Worker], sender: StreamSender, way: str, dtype: str
) -> None:
    worker, source = start_worker(), Source(SHAPES)
    link = worker.link(way)
    for number in range(3):
        source.seed = number
        stage(sender, source, link, session=f"session-{number}", dtype=dtype)
        assert worker.ask("views", f"session-{number}") == digests_of(source, dtype)
    sizes = [source.tensor(i).numel() * 4 for i in range(len(SHAPES))]
    assert sender.cast_bytes == (sum(sizes) if dtype == "bfloat16" else 0)


def test_one_reading_serves_all_workers(start_worker: Callable[..., Worker], sender: StreamSender) -> None:
    workers, source = [start_worker(), start_worker()], Source(SHAPES)
    links = [workers[0].link("unix"), workers[0].link("tcp"), workers[1].link("tcp")]
    with pytest.raises(TransportError, match="offered weights already"):
        stage(sender, source, *links, session="session-0")  # one worker cannot take a session twice
    links = [workers[0].link("unix"), workers[1].link("tcp")]
    source.read = 0
    stage(sender, source, *links, session="session-1")
    assert source.read == 1
    assert [worker.ask("views", "session-1") for worker in workers] == [digests_of(source)] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sender_holds_a_few_buckets_and_no_version(
    start_worker: Callable[..., Worker], sender: StreamSender, dtype: str
) -> None:
    source = Source([(256, 512)] * 200)  # 100 MiB, half a bucket each
    stage(sender, source, start_worker().link("unix"), session="session-1", dtype=dtype)
    # Two buckets ahead, one that is sent, one that is gathered, and those in between two hands.
    assert source.most_alive <= 14
    assert source.alive <= 2


def test_a_view_that_a_loader_keeps_outlives_its_session(
    start_worker: Callable[..., Worker], sender: StreamSender
) -> None:
    worker, first, second = start_worker(), Source(SHAPES, seed=1), Source(SHAPES, seed=2)
    link = worker.link()
    stage(sender, first, link, session="session-1")
    worker.ask("hold", "session-1")
    worker.ask("finish", "session-1")
    stage(sender, second, link, session="session-2")
    assert worker.ask("views", "session-2") == digests_of(second)
    assert worker.ask("held") == digests_of(first)


@contextlib.contextmanager
def torn(port: int, at: int) -> Iterator[int]:
    """A way to ``port`` on which one bit of byte ``at`` from trainer to worker flips; yields where it begins."""

    def carry(source: socket.socket, target: socket.socket, flip: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if passed <= flip < passed + len(data):
                    data[flip - passed] ^= 1
                passed += len(data)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            ours, _ = listener.accept()
            with ours, socket.create_connection(("127.0.0.1", port)) as theirs:
                back = threading.Thread(target=carry, args=(theirs, ours, -1))
                back.start()
                carry(ours, theirs, at)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)


def test_a_bit_that_flips_on_the_way_is_found_and_named(
    start_worker: Callable[..., Worker], sender: StreamSender
) -> None:
    worker, source = start_worker(), Source([(64,), (1 << 18,), (64,)])
    with torn(worker.port, 500_000) as port:
        link = worker.link(port=port)
        with pytest.raises(DigestMismatch, match="w1 arrived with another content.*kept its old weights"):
            stage(sender, source, link, session="session-1")
        stage(sender, source, link, session="session-2")  # the link is still in step
        link.close()


def test_e07_a_refusal_is_heard_while_the_source_is_busy_and_the_link_goes_on(
    start_worker: Callable[..., Worker], sender: StreamSender
) -> None:
    source = Source(SHAPES, hold=1)
    link, begin = start_worker("raises").link(), time.monotonic()
    with pytest.raises(TransportError, match="refused what it was sent: RuntimeError: broken while"):
        stage(sender, source, link, session="session-1")
    assert time.monotonic() - begin < 2.0
    with pytest.raises(DeadlineExceeded, match="has not returned from the version that failed"):
        stage(sender, Source(SHAPES), link, session="session-2", wait_s=0.2)
    source.go.set()
    with pytest.raises(TransportError, match="broken while"):  # in step: it hears of the next session
        stage(sender, Source(SHAPES), link, session="session-3")


@WAYS
def test_a_worker_that_dies_is_noticed_at_once(
    start_worker: Callable[..., Worker], sender: StreamSender, way: str
) -> None:
    worker, source = start_worker(), Source(SHAPES, hold=8)
    link = worker.link(way)
    killer = threading.Thread(target=lambda: source.asked.wait(10) and worker.process.kill())
    killer.start()
    begin = time.monotonic()
    with pytest.raises(LinkLost):
        stage(sender, source, link, session="session-1")
    assert time.monotonic() - begin < 5.0
    assert link.lost()
    source.go.set()
    killer.join()


@WAYS
def test_a_worker_that_does_not_read_meets_the_deadline(
    start_worker: Callable[..., Worker], sender: StreamSender, way: str
) -> None:
    worker, source = start_worker(), Source([(64, MIB)])
    good, link = start_worker(), worker.link(way)
    other = good.link(way)
    worker.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="sending weights"):
        stage(sender, source, other, link, session="session-1", wait_s=1.0)
    assert time.monotonic() - begin < 8.0
    assert link.lost(), "nobody knows where its next frame would begin"
    stage(sender, Source(SHAPES), good.link(way), session="session-2")


@WAYS
def test_a_trainer_that_dies_leaves_a_worker_that_serves(
    start_worker: Callable[..., Worker], sender: StreamSender, way: str
) -> None:
    worker, source = start_worker(), Source(SHAPES, hold=8)
    link = worker.link(way)
    threading.Thread(target=lambda: source.asked.wait(10) and link.close()).start()
    with pytest.raises(LinkLost):
        stage(sender, source, link, session="session-1")
    source.go.set()
    stage(sender, Source(SHAPES), worker.link(way), session="session-2")


def test_a_liar_reserves_nothing_in_the_worker(start_worker: Callable[..., Worker]) -> None:
    """Offers of more than there is are refused; what may be true costs an address range, until bytes come for it."""
    worker = start_worker()
    before = usage(worker.process.pid)["rss"]
    for number in range(16):
        absurd = number % 2 == 0
        offer = Offer(
            session=f"session-{number}",
            version=1,
            segment=f"{number:032x}",
            segment_bytes=1 << 48 if absurd else 512 << 20,
            generation=0,
            handle=Handle(kind="stream"),
            tensors=(SLOT,),
        )
        link = worker.link()
        link.send(offer, deadline=time.monotonic() + 5)
        if absurd:
            answer, _ = link.receive(deadline=time.monotonic() + 5)
            assert isinstance(answer, Fault)
            assert "no room for the weights" in answer.text
    deadline = time.monotonic() + 5
    while mapped_mib(worker.process.pid) < 8 * 512:
        assert time.monotonic() < deadline
    assert usage(worker.process.pid)["rss"] - before < 16 * MIB


def mapped_mib(pid: int) -> int:
    """The address ranges of a process that are made of whole versions."""
    found = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        found += (high - low) // MIB if (high - low) >= 512 * MIB and len(line.split()) == 5 else 0
    return found


@WAYS
def test_fifty_versions_leave_no_trace(start_worker: Callable[..., Worker], sender: StreamSender, way: str) -> None:
    worker, source = start_worker(), Source(SHAPES)
    links, before = [worker.link(way)], {}
    for number in range(90):
        if number == 40:  # the allocator's arenas grow for about 30
            before = {"trainer": usage("self"), "worker": usage(worker.process.pid)}
        source.seed = number
        stage(sender, source, *links, session=f"session-{number}")
        if not number % 10:
            assert worker.ask("views", f"session-{number}") == digests_of(source)
        worker.ask("finish", f"session-{number}")
    after = {"trainer": usage("self"), "worker": usage(worker.process.pid)}
    for side, counts in after.items():
        for what, slack in (("fds", 1), ("threads", 1), ("mappings", 10), ("rss", RSS_SLACK_BYTES)):
            assert counts[what] <= before[side][what] + slack, (side, what, before, after)
