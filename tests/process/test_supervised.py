"""A fleet that starts, watches and heals its engines: real processes under the restrictive profile, really killed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from syncstack import ModuleSource, Settings
from syncstack.errors import FleetTooSmall, UsageError
from syncstack.fleet.fleet import Fleet
from syncstack.fleet.process import alive_in
from syncstack.fleet.states import EngineState, Policy, State
from syncstack.fleet.supervised import EngineProcess
from tests.ports import free_port
from tests.process.conftest import environment, served, under
from tests.process.fleet import DEADLINES, TOKEN
from tests.process.trainer import change, logprobs

POLICY = Policy(first_wait_s=60, interval_s=0.2, timeout_s=2, misses=3, backoff_s=0.1, restarts=5)
WATCHDOG_S = 60.0
BOTH = {"engine-0", "engine-1"}


def make_engine(folder: Path, model: Path, name: str, command: list[str] | None = None) -> EngineProcess:
    port, address = free_port(), f"tcp://127.0.0.1:{free_port()}"
    argv = [sys.executable, "-m", "syncstack.cli", "engine", "reference", "--model", str(model)]
    env = {
        **environment(folder), **DEADLINES, "SYNCSTACK_LISTEN": address, "SYNCSTACK_TOKEN": TOKEN,
        "SYNCSTACK_WAIT_FOR_REFIT": "true",
    }  # fmt: skip
    return EngineProcess(
        name,
        address=address,
        url=f"http://127.0.0.1:{port}",
        argv=command or under("restrictive", [*argv, "--port", str(port), "--name", name]),
        env=env,
        log=folder / f"{name}.log",
    )


def make_settings(**options: int) -> Settings:
    return Settings.load(token=TOKEN, link_s=6, control_s=5, load_s=4, pause_s=4, engine_ready_s=60, **options)


class Trained:
    """A fleet, the model that is trained, and what each version answers."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.path = folder, model
        self.engines = {name: make_engine(folder, model, name) for name in sorted(BOTH)}
        self.fleet = Fleet([*self.engines.values()], settings=make_settings(min_engines=1), policy=POLICY)
        self.fleet.start()
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.fleet.attach(ModuleSource(self.model))
        self.version = 0
        self.logprobs: dict[int, list[float]] = {}

    def refit(self) -> set[str]:
        self.version += 1
        change(self.model, self.version)
        self.logprobs[self.version] = logprobs(self.model)
        return {report.engine for report in self.fleet.refit(self.version)}

    def state(self, name: str) -> EngineState:
        return next(state for state in self.fleet.states() if state.name == name)

    def until(self, name: str, done: Callable[[EngineState], bool]) -> list[State]:
        """Wait; returns the states that were seen on the way."""
        deadline, seen = time.monotonic() + WATCHDOG_S, list[State]()
        while True:
            found = self.state(name)
            seen += [found.state] * (seen[-1:] != [found.state])
            if done(found):
                return seen
            assert time.monotonic() < deadline, (seen, self.fleet.states())
            time.sleep(0.02)

    def served(self, name: str) -> int | None:
        """The version with whose weights an engine answers; None where it refuses or is not there."""
        return served(self.engines[name].url, self.logprobs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trained]:
    made = Trained(tmp_path_factory.mktemp("fleet"), model)
    yield made
    made.fleet.close()


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> None:
    """Each test that uses the fleet begins with all of it at one version."""
    if "trained" not in request.fixturenames:
        return
    trained: Trained = request.getfixturevalue("trained")
    deadline = time.monotonic() + WATCHDOG_S
    while trained.refit() != BOTH:
        assert time.monotonic() < deadline, trained.fleet.states()


def healthy(version: int) -> Callable[[EngineState], bool]:
    return lambda state: state.state is State.HEALTHY and state.version == version


def test_it_begins_with_engines_that_are_healthy_at_the_first_version(trained: Trained) -> None:
    states = trained.fleet.states()
    assert {(state.name, state.state, state.version) for state in states} == {
        (name, State.HEALTHY, trained.version) for name in BOTH
    }
    assert trained.served("engine-0") == trained.served("engine-1") == trained.version


def test_an_engine_that_is_killed_is_started_again_and_brought_back_while_training_goes_on(trained: Trained) -> None:
    before = trained.engines["engine-1"].pid
    assert before is not None
    os.killpg(before, signal.SIGKILL)
    assert trained.refit() == {"engine-0"}
    seen = trained.until("engine-1", healthy(trained.version))
    assert State.RESTARTING in seen
    assert trained.engines["engine-1"].pid != before
    assert trained.served("engine-1") == trained.served("engine-0") == trained.version
    assert trained.refit() == BOTH


def test_one_that_dies_and_is_back_between_two_refits_serves_before_the_next(trained: Trained) -> None:
    pid = trained.engines["engine-1"].pid
    assert pid is not None
    os.killpg(pid, signal.SIGKILL)
    trained.until("engine-1", lambda state: state.state is State.RESTARTING)
    seen = trained.until("engine-1", healthy(trained.version))
    assert State.DEAD not in seen
    assert trained.served("engine-1") == trained.version
    assert trained.refit() == BOTH


def test_one_that_hangs_is_found_by_its_probe_and_killed(trained: Trained, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    pid = trained.engines["engine-1"].pid
    assert pid is not None
    os.killpg(pid, signal.SIGSTOP)  # its sockets take connections as before
    seen = trained.until("engine-1", lambda state: state.state is State.RESTARTING)
    assert State.UPDATING not in seen
    assert not alive_in(pid)
    trained.until("engine-1", healthy(trained.version))
    assert "engine-1 is dead: 3 probes in a row failed: ReadTimeout" in caplog.text


def test_nobody_is_started_again_under_a_refit(trained: Trained) -> None:
    pid = trained.engines["engine-1"].pid
    assert pid is not None
    with trained.fleet.recovery:
        os.killpg(pid, signal.SIGKILL)
        trained.until("engine-1", lambda state: state.state is State.DEAD)
        time.sleep(5 * POLICY.interval_s)
        assert trained.state("engine-1").state is State.DEAD
    trained.until("engine-1", healthy(trained.version))


def test_an_engine_is_added_and_removed_while_the_others_serve(trained: Trained) -> None:
    trained.engines["engine-2"] = make_engine(trained.folder, trained.path, "engine-2")
    answers: list[int | None] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.05):
            answers.append(trained.served("engine-0"))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        trained.fleet.add(trained.engines["engine-2"])
        trained.until("engine-2", healthy(trained.version))
    finally:
        over.set()
        asking.join()
    assert set(answers) == {trained.version}, "an engine stopped for the new one"
    assert trained.served("engine-2") == trained.version
    assert trained.refit() == {*BOTH, "engine-2"}
    with pytest.raises(UsageError, match="engine-2 already"):
        trained.fleet.add(trained.engines["engine-2"])
    trained.fleet.remove("engine-2")
    assert trained.refit() == BOTH
    assert trained.engines["engine-2"].ended()
    with pytest.raises(UsageError, match="no engine of the name engine-2"):
        trained.fleet.remove("engine-2")


def test_too_few_engines_end_it_with_each_ones_reason_and_nothing_left_running(tmp_path: Path, model: Path) -> None:
    good = make_engine(tmp_path, model, "engine-0")
    bad = make_engine(tmp_path, model, "engine-1", [sys.executable, "-c", "raise SystemExit(3)"])
    policy = Policy(first_wait_s=60, interval_s=0.1, timeout_s=2, backoff_s=0.05, restarts=2)
    with pytest.raises(FleetTooSmall, match=r"engine-1 dead its process ended with 3.*2 that answer"):
        Fleet([good, bad], settings=make_settings(), policy=policy).start()
    assert good.ended()
    assert bad.ended()


def test_two_engines_of_one_name_are_refused(tmp_path: Path, model: Path) -> None:
    engine = make_engine(tmp_path, model, "engine-0")
    with pytest.raises(UsageError, match="names of their own"):
        Fleet([engine, engine], settings=make_settings())
