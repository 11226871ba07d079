"""What only the real pair shows: a trial that the kernel refuses, all links moving together, paths that are slow."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from syncstack import Coordinator, EngineClient, ModuleSource, Settings
from syncstack.errors import PlanError, RefitFailed
from syncstack.facts import collect, say_hello
from syncstack.plan import Choice
from syncstack.refit.agreement import Agreement
from syncstack.refit.messages import EngineInfo, WorkerInfo
from syncstack.refit.state import StateReport, Step
from syncstack.refit.target import Target
from syncstack.refit.trial import Trials
from syncstack.transports import SPOKEN
from syncstack.transports.senders import make_sender
from syncstack.weights.manifest import Wanted
from syncstack.weights.meta import ParamMeta
from syncstack.wire import unix
from syncstack.wire.link import Link, greet
from tests.process.conftest import REPO, environment, make_model
from tests.process.test_bad_input import cli
from tests.process.test_pidfd import NOBODY, needs
from tests.process.test_refit import StartEngine, StartTrainer, read_line
from tests.process.test_tcp import Pod, address_of, make_pod

__all__ = ["make_pod"]  # a fixture

WANTED = [Wanted(meta=ParamMeta(name="w", dtype="float32", shape=(1024, 64)), source="w")]


class Worker:
    """A worker's data socket in a process of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.sock"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", str(self.path)],
            env=environment(folder), cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def started(self) -> Worker:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    def link(self) -> Link:
        deadline = time.monotonic() + 20
        link = Link(unix.connect(self.path, deadline=deadline))
        greet(link, role="trainer", rank=0, deadline=deadline)
        return link

    def starve(self) -> None:
        """Leave it the descriptors that it has, and not one more."""
        open_now = {int(name) for name in os.listdir(f"/proc/{self.process.pid}/fd")}
        limit = next(number for number in range(1 << 16) if number not in open_now)
        assert limit > max(open_now)
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (limit, hard))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Worker]]:
    made = [Worker(tmp_path, name) for name in ("a", "b", "c")]
    yield [worker.started() for worker in made]
    for worker in made:
        worker.process.kill()
        worker.process.communicate()


class Engine:
    """As much of an engine as a plan and a trial ask for: what it said in its hello, and its worker."""

    way = "unix"
    address = "unix:/nowhere"

    def __init__(self, worker: Worker, folder: Path, after: Callable[[], None] = lambda: None) -> None:
        self.worker = worker
        self.name = worker.path.stem
        self._after = after
        hello = say_hello("engine", name=self.name, transports=SPOKEN, facts=collect(socket_dir=folder))
        state = StateReport(step=Step.SERVING, version=0, target=None, accepts_requests=True, reason="", since=0.0)
        self.info = EngineInfo(
            protocol=1, name=self.name, kind="reference", kind_version="1", model="m", dtype="float32", tensors=(),
            workers=(WorkerInfo(socket=worker.path.name, hello=hello),), heartbeat_s=0.5, state=state,
        )  # fmt: skip

    def open_links(self, rank: int, choices: Sequence[Choice]) -> list[Link]:
        link = self.worker.link()
        self._after()
        self._after = lambda: None
        return [link]


def test_one_links_refusal_is_known_within_2_s_and_says_nothing_of_the_others(workers: list[Worker]) -> None:
    with contextlib.ExitStack() as stack:
        links = {worker.path.stem: stack.enter_context(contextlib.closing(worker.link())) for worker in workers}
        workers[1].starve()
        begin = time.monotonic()
        ended = Trials("host_fd", {name: (link, "scm") for name, link in links.items()}, bucket_bytes=1 << 20).run(10)
        assert time.monotonic() - begin < 2.0
    assert [each.link for each in ended] == ["a", "b", "c"]
    assert [bool(each.cause) for each in ended] == [False, True, False]
    assert "this process may open no more of them (observed: RLIMIT_NOFILE " in ended[1].cause


def test_a26_one_refusal_takes_all_links_to_the_next_transport_with_one_warning(
    workers: list[Worker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that is out of descriptors: no hello can tell, since it is a matter of the moment."""
    caplog.set_level(logging.INFO)
    engines = [Engine(worker, tmp_path, worker.starve if worker is workers[1] else lambda: None) for worker in workers]
    targets = [Target(engine) for engine in engines]  # type: ignore[arg-type]
    agreement = Agreement(Settings.load(socket_dir=tmp_path))
    assert agreement.reach(targets, WANTED) == "stream"
    assert [target.choice.transport for target in targets] == ["stream"] * 3
    for target in targets:
        assert target.choice.why_not["host_fd"].startswith("a trial refused it: b worker 0: ")
        target.drop_links()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("a trial refused host_fd on b worker 0: ")
    assert warning.endswith("; all links take stream")
    assert agreement.rate is not None
    assert agreement.rate.again > 0


def test_without_a_next_transport_the_refusal_is_the_plans_reason(workers: list[Worker], tmp_path: Path) -> None:
    targets = [Target(Engine(worker, tmp_path, worker.starve)) for worker in workers]  # type: ignore[arg-type]
    agreement = Agreement(Settings.load(socket_dir=tmp_path, transport="host_fd"))
    with pytest.raises(PlanError, match=r"host_fd: .*a trial refused it: a worker 0 \(and 2 more links\)"):
        agreement.reach(targets, WANTED)
    assert [target.links for target in targets] == [[], [], []]


def test_a26_a_trainer_that_hides_after_its_hello_is_found_out_by_the_trial(
    start_engine: StartEngine, start_trainer: StartTrainer, make_pod: Callable[..., Pod], model: Path, tmp_path: Path
) -> None:
    """The plan says pidfd_getfd; the kernel says no. Not a byte is lost, and the engine never stops for it."""
    needs(NOBODY)
    pod = make_pod(65534)
    tmp_path.chmod(0o755)
    copy = pod.folder / "model"
    copy.mkdir(mode=0o755)
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    engine = start_engine(model=copy, env=pod.listening(), wrap=[*pod.wrap, *NOBODY])
    address = address_of(engine)
    trainer = start_trainer(copy, "2", address=address, env=pod.env(TRAINER_HIDES="1"), wrap=[*pod.wrap, *NOBODY])
    assert read_line(trainer)["ready"]
    for version in (1, 2):
        report = read_line(trainer)
        assert (report["version"], report["transport"]) == (version, "stream")
        assert report["digests_equal"] == report["tensors"]
        assert report["why_not"]["host_fd"].startswith("a trial refused it: engine-0 worker 0: ")
        assert "dumpable" in report["why_not"]["host_fd"]
    assert engine.complete().headers["x-syncstack-version"] == "2"


@pytest.mark.parametrize("transport", sorted({*SPOKEN} - {"cuda_fd", "cuda_ipc", "collective"}))
def test_b12_an_empty_tensor_is_carried_as_metadata_only(workers: list[Worker], transport: str) -> None:
    source = ModuleSource(torch.nn.Module())
    for name, tensor in {"none": torch.empty(0, 7), "w": torch.ones(3), "last": torch.empty(0)}.items():
        source._module.register_buffer(name, tensor)
    wanted = [Wanted(meta=meta, source=meta.name) for meta in source.metadata()]
    sender = make_sender(transport, bucket_bytes=1 << 20)
    with contextlib.closing(workers[0].link()) as link, contextlib.closing(sender):
        for version in (1, 2):
            session = f"version-{version}"
            manifest, (staged,) = sender.stage(source, wanted, [link], session=session, version=version, wait_s=10)
            assert staged.digests_equal == 3
            assert manifest.payload_bytes == 12


class Sleepy:
    """A weight source that can be told to take its time."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._source = ModuleSource(module)
        self.metadata, self.aliases = self._source.metadata, self._source.aliases
        self.sleep_s = 0.0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(self.sleep_s)
        yield from self._source


@pytest.fixture
def pair(start_engine: StartEngine, tmp_path: Path, socket_dir: Path) -> tuple[Any, Sleepy]:
    """An engine and a source of 30 MB: enough to be timed."""
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / "large", hidden=512)
    return start_engine(model=folder), Sleepy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_a_slow_path_is_told_once_with_its_cause_and_strict_mode_ends_it_while_the_engine_serves(
    pair: tuple[Any, Sleepy], socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, source = pair
    settings = Settings.load(socket_dir=socket_dir)
    client = EngineClient.connect(engine.address, settings=settings)
    with Coordinator(source=source, engines=[client], settings=settings) as coordinator:
        coordinator.refit(1)
        source.sleep_s = 2.0
        slow = [coordinator.refit(version)[0].slow for version in (2, 3)]
    assert all("the weight source took 2." in each for each in slow)
    warnings = [record.getMessage() for record in caplog.records if "host_fd is slow" in record.getMessage()]
    assert len([text for text in warnings if "the weight source" in text]) == 1

    strict = Settings.load(socket_dir=socket_dir, strict=True)
    client = EngineClient.connect(engine.address, settings=strict)
    with Coordinator(source=source, engines=[client], settings=strict) as coordinator:
        with pytest.raises(RefitFailed, match="Strict mode forbids that") as caught:
            coordinator.refit(4)
        assert (caught.value.phase, caught.value.engine_state) == ("stage", "serving (version 3)")
    assert engine.complete().headers["x-syncstack-version"] == "3"


def test_probe_moves_real_buckets_and_leaves_the_engine_as_it_was(start_engine: StartEngine, socket_dir: Path) -> None:
    engine = start_engine()
    before = engine.logprobs()
    text = cli(socket_dir, "probe", "--peer", engine.address)
    assert text.returncode == 0, text.stderr
    assert "host_fd, descriptors by SCM_RIGHTS" in text.stdout
    assert "digests equal on 1 worker\n" in text.stdout
    report = json.loads(cli(socket_dir, "probe", "--peer", engine.address, "-o", "json").stdout)
    assert (report["transport"], report["fd"], report["digests_equal"]) == ("host_fd", "scm", True)
    assert report["bytes_per_s"] > 0
    assert engine.logprobs() == before
    assert engine.complete().headers["x-syncstack-version"] == "0"
    nobody = cli(socket_dir, "probe", "--peer", f"unix:{socket_dir}/engine-7", "--wait", "0.5")
    assert nobody.returncode == 2
    assert "did not become ready within 0.5 s" in nobody.stderr
