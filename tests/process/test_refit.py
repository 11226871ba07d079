"""The transaction between real processes: it works under every profile, and every death ends in a known state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncstack import EngineClient, ParamMeta, Settings
from syncstack.errors import EngineBusy, ProtocolError, SyncstackError
from syncstack.plan import Choice
from syncstack.refit.messages import StepRequest
from syncstack.refit.state import StateReport, Step
from syncstack.transports.host_fd.segment import SenderSegment
from syncstack.weights.digest import digest
from syncstack.weights.manifest import Wanted, layout
from syncstack.wire.link import Link
from syncstack.wire.messages import BucketReady, Offer, Staged, StageEnd
from tests.process.conftest import PROFILES, Engine

StartEngine = Callable[..., Engine]
StartTrainer = Callable[..., "subprocess.Popen[str]"]

SLOW_S = 0.15
"""Per tensor: the 20 tensors of the model take three seconds, time enough to kill somebody in the middle."""


def read_line(trainer: subprocess.Popen[str]) -> dict[str, Any]:
    assert trainer.stdout is not None
    line = trainer.stdout.readline()
    if not line:
        pytest.fail(f"the trainer ended: {trainer.communicate()[1][-3000:]}")
    found: dict[str, Any] = json.loads(line)
    return found


def state_of(socket_dir: Path, name: str = "engine-0") -> StateReport:
    client = EngineClient.connect(f"unix:{socket_dir}/{name}", settings=Settings.load(socket_dir=socket_dir))
    try:
        return client.state()
    finally:
        client.close()


def await_step(socket_dir: Path, step: Step, seconds: float = 15.0, name: str = "engine-0") -> StateReport:
    deadline = time.monotonic() + seconds
    while True:
        state = state_of(socket_dir, name)
        if state.step is step:
            return state
        assert time.monotonic() < deadline, f"expected {step}, still {state}"
        time.sleep(0.05)


def close_to(found: list[float], expected: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4


@pytest.mark.parametrize("profile", PROFILES)
def test_weights_arrive_under_the_profile(
    start_engine: StartEngine, start_trainer: StartTrainer, model: Path, profile: str
) -> None:
    engine = start_engine(profile=profile)
    before = engine.complete()
    assert before.headers["x-syncstack-version"] == "0"
    trainer = start_trainer(model, "3", profile=profile)
    assert read_line(trainer)["pidfd_getfd"] == {"permissive": "ok", "restrictive": "denied"}[profile]
    for version in (1, 2, 3):
        report = read_line(trainer)
        assert report["version"] == version
        assert report["transport"] == "host_fd"
        assert set(report["why_not"]) == {"cuda_fd", "cuda_ipc"}
        assert report["digests_equal"] == report["tensors"] == 20
        assert list(report["phases"]) == ["begin", "stage", "pause", "load", "verify", "commit", "resume"]
    assert trainer.wait(timeout=30) == 0
    after = engine.complete()
    assert after.headers["x-syncstack-version"] == "3"
    assert close_to(engine.logprobs(), report["logprobs"])
    assert not close_to(before.json()["choices"][0]["logprobs"]["token_logprobs"], report["logprobs"])


def test_an_engine_of_another_model_refuses_and_serves_on(
    start_engine: StartEngine, start_trainer: StartTrainer, other_model: Path, socket_dir: Path
) -> None:
    engine = start_engine()
    before = engine.logprobs()
    trainer = start_trainer(other_model, "1")
    read_line(trainer)
    failure = read_line(trainer)
    assert failure["error"] == "ManifestMismatch"
    assert "shapes differ (20): model.embed_tokens.weight [256, 32] for [256, 64]" in failure["text"]
    assert "and 10 more" in failure["text"]
    assert trainer.wait(timeout=30) == 2
    assert state_of(socket_dir).step is Step.SERVING
    assert engine.logprobs() == before


def test_an_engine_that_dies_in_a_load_is_named_with_its_phase_within_5_s(
    start_engine: StartEngine, start_trainer: StartTrainer, model: Path, socket_dir: Path
) -> None:
    engine = start_engine(slow_s=SLOW_S)
    trainer = start_trainer(model, "1")
    read_line(trainer)
    await_step(socket_dir, Step.LOADING)
    killed = time.monotonic()
    engine.kill()
    failure = read_line(trainer)
    assert time.monotonic() - killed < 5.0
    assert failure["error"] == "RefitFailed"
    assert failure["phase"] == "load"
    assert "unreachable" in failure["text"]
    assert trainer.wait(timeout=10) == 1


def test_e09_an_engine_that_is_frozen_in_a_load_is_given_up(
    start_engine: StartEngine, start_trainer: StartTrainer, model: Path, socket_dir: Path
) -> None:
    engine = start_engine(slow_s=SLOW_S)
    trainer = start_trainer(model, "1")
    read_line(trainer)
    await_step(socket_dir, Step.LOADING)
    engine.kill(signal.SIGSTOP)
    failure = read_line(trainer)
    assert failure["phase"] == "load"
    assert failure["seconds"] < 20.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_c12_a_trainer_that_dies_in_a_load_leaves_a_dirty_engine_that_the_next_refit_heals(
    start_engine: StartEngine, start_trainer: StartTrainer, model: Path, socket_dir: Path, number: int
) -> None:
    engine = start_engine(slow_s=SLOW_S)
    trainer = start_trainer(model, "1")
    read_line(trainer)
    await_step(socket_dir, Step.LOADING)
    os.killpg(trainer.pid, number)
    state = await_step(socket_dir, Step.DIRTY)
    assert state.version == 0
    assert "its trainer went away" in state.reason
    refused = engine.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "engine_dirty"
    assert refused.headers["x-syncstack-version"] == "0"
    healer = start_trainer(model, "1", "7")
    read_line(healer)
    report = read_line(healer)
    assert report["digests_equal"] == 20
    state = await_step(socket_dir, Step.SERVING)
    assert (state.version, state.reason) == (1, "")
    assert close_to(engine.logprobs(), report["logprobs"])


def test_a_frozen_trainer_before_the_load_costs_the_engine_nothing(
    start_engine: StartEngine, start_trainer: StartTrainer, model: Path, socket_dir: Path
) -> None:
    """Begin, then silence: the engine serves its old weights throughout, and again when the trainer is killed."""
    engine = start_engine()
    before = engine.logprobs()
    client = EngineClient.connect(engine.address, settings=Settings.load(socket_dir=socket_dir))
    lease = client.begin("session-of-a-trainer", 5, client.info.tensors)
    assert state_of(socket_dir).step is Step.OPEN
    assert engine.logprobs() == before
    lease.close()
    client.close()
    assert await_step(socket_dir, Step.SERVING).version == 0
    assert engine.logprobs() == before


def test_requests_get_503_while_weights_move(
    start_engine: StartEngine, start_trainer: StartTrainer, model: Path, socket_dir: Path
) -> None:
    engine = start_engine(slow_s=SLOW_S)
    trainer = start_trainer(model, "1")
    read_line(trainer)
    await_step(socket_dir, Step.LOADING)
    refused = engine.complete()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["type"] == "engine_updating"
    read_line(trainer)
    assert engine.complete().headers["x-syncstack-version"] == "1"


def test_a_second_trainer_is_refused_while_a_refit_is_open(
    start_engine: StartEngine, start_trainer: StartTrainer, model: Path, socket_dir: Path
) -> None:
    start_engine(slow_s=SLOW_S)
    first = start_trainer(model, "1")
    read_line(first)
    await_step(socket_dir, Step.LOADING)
    client = EngineClient.connect(f"unix:{socket_dir}/engine-0", settings=Settings.load(socket_dir=socket_dir))
    with pytest.raises(EngineBusy, match="another refit is open"):
        client.begin("session-of-another", 2, client.info.tensors)
    client.close()
    assert read_line(first)["digests_equal"] == 20


def stage(link: Link, session: str, version: int, tensors: Sequence[ParamMeta]) -> SenderSegment:
    """Offer zeros for ``tensors`` over a link, as a sender that is not ours might."""
    manifest = layout([Wanted(meta=meta, source=meta.name) for meta in tensors])
    segment = SenderSegment(manifest.total_bytes)
    generation, deadline = segment.begin_write(), time.monotonic() + 10
    segment.end_write()
    offer = Offer(
        session=session,
        version=version,
        segment=segment.nonce,
        segment_bytes=segment.data_bytes,
        generation=generation,
        tensors=manifest.tensors,
    )
    link.send(offer, fds=[segment.fd], deadline=deadline)
    digests = tuple(digest(bytes(slot.nbytes)) for slot in manifest.tensors)
    link.send(BucketReady(session=session, first=0, digests=digests), deadline=deadline)
    link.send(StageEnd(session=session), deadline=deadline)
    message, _ = link.receive(deadline=deadline)
    assert isinstance(message, Staged)
    return segment


@pytest.mark.parametrize("fault", ["another shape", "another version", "a subset", "changed bytes"])
def test_c04_only_what_begin_announced_and_the_worker_verified_is_published(
    start_engine: StartEngine, socket_dir: Path, fault: str
) -> None:
    engine = start_engine()
    client = EngineClient.connect(engine.address, settings=Settings.load(socket_dir=socket_dir))
    (link,) = client.open_links(0, [Choice(transport="host_fd", fd="scm")])
    session = "session-of-a-stranger"
    lease = client.begin(session, 5, client.info.tensors)
    tensors = list(client.info.tensors)
    if fault == "another shape":
        tensors = [msgspec.structs.replace(meta, shape=(1,) * len(meta.shape)) for meta in tensors]
    segment = stage(
        link, session, 6 if fault == "another version" else 5, tensors[:-1] if fault == "a subset" else tensors
    )
    if fault == "changed bytes":
        segment.data[-64:] = bytes(range(64))  # and the generation stays as it was
    with pytest.raises(SyncstackError, match="changed while the engine|not those that begin announced"):
        for step in ("pause", "load", "verify", "commit", "resume"):
            client.step(step, StepRequest(session=session), deadline_s=30)
    state = client.state()
    assert (state.step, state.version) == (Step.DIRTY, 0)
    assert engine.complete().status_code == 503
    lease.close()
    link.close()
    client.close()


def test_d39_commit_without_the_steps_before_it_publishes_nothing(start_engine: StartEngine, socket_dir: Path) -> None:
    engine = start_engine()
    client = EngineClient.connect(engine.address, settings=Settings.load(socket_dir=socket_dir))
    lease = client.begin("session-in-a-hurry", 99, client.info.tensors)
    for step in ("verify", "commit", "resume", "load"):
        with pytest.raises(ProtocolError, match="cannot follow"):
            client.step(step, StepRequest(session="session-in-a-hurry"), deadline_s=30)
    assert engine.complete().headers["x-syncstack-version"] == "0"
    lease.close()
    client.close()


def test_a_restarted_engine_gets_the_next_version(start_engine: StartEngine, model: Path, socket_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from syncstack import Coordinator, ModuleSource

    engine = start_engine()
    settings = Settings.load(socket_dir=socket_dir, engine_ready_s=60)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    client = EngineClient.connect(engine.address, settings=settings)
    with Coordinator(source=ModuleSource(module), engines=[client], settings=settings) as coordinator:
        coordinator.refit(1)
        engine.stop()
        again = start_engine()
        assert again.complete().headers["x-syncstack-version"] == "0"
        coordinator.refit(2)
        assert again.complete().headers["x-syncstack-version"] == "2"


def test_d47_a_version_that_changes_nothing_is_said(
    start_engine: StartEngine, model: Path, socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where adapters are trained and the base weights are sent: everything is green, and nothing is learned."""
    import torch
    from transformers import AutoModelForCausalLM

    from syncstack import Coordinator, ModuleSource

    engine = start_engine()
    settings = Settings.load(socket_dir=socket_dir, engine_ready_s=60)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    client = EngineClient.connect(engine.address, settings=settings)
    with Coordinator(source=ModuleSource(module), engines=[client], settings=settings) as coordinator:
        found = [coordinator.refit(version)[0].unchanged_since for version in (1, 2, 3)]
        assert found == [None, 1, 1]
        with torch.no_grad():
            next(module.parameters())[0, 0] += 1.0
        assert [coordinator.refit(version)[0].unchanged_since for version in (4, 4)] == [None, None]
    said = [record.getMessage() for record in caplog.records if "not one byte" in record.getMessage()]
    assert [line.partition(" has")[0] for line in said] == ["version 2"]


def test_an_engine_ends_when_its_trainer_says_so_but_not_under_a_refit(
    socket_dir: Path, start_engine: StartEngine
) -> None:
    engine = start_engine()
    client = EngineClient.connect(f"unix:{socket_dir}/engine-0", settings=Settings.load(socket_dir=socket_dir))
    try:
        lease = client.begin("a-session", 1, client.info.tensors)
        with pytest.raises(EngineBusy, match="a refit is open"):
            client.end()
        client.step("abort", StepRequest(session="a-session"), deadline_s=5)
        lease.close()
        client.end()
    finally:
        client.close()
    assert engine.process.wait(10) == 0
