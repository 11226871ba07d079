"""Engines that fail while others serve, all real processes: left behind, and brought back when they answer again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from syncstack.refit.state import Step
from tests.process.fleet import WATCHDOG_S, Fleet
from tests.process.warm import Warm


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Any, warm: Warm) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), model, warm)
    yield made
    made.close()


def test_d40_d42_an_engine_that_is_killed_comes_back_with_the_current_version_only(fleet: Fleet) -> None:
    assert set(fleet.refit()["reports"]) == {"engine-0", "engine-1"}
    victim = fleet.members["engine-1"]
    victim.engine.kill()
    answer = fleet.refit()
    assert set(answer["reports"]) == {"engine-0"}
    assert set(answer["left"]) == {"engine-1"}
    assert (fleet.served("engine-0"), fleet.served("engine-1")) == (2, None)

    victim.restart()
    held = victim.engine.complete()
    assert held.status_code == 503, "a restarted engine served the weights of its folder"
    assert "waits for its first refit" in held.text
    deadline = time.monotonic() + WATCHDOG_S
    while "engine-1" not in answer["reports"]:
        assert time.monotonic() < deadline
        answer = fleet.refit()
    assert answer["reports"]["engine-1"]["back_after_s"] > 0
    assert answer["reports"]["engine-0"]["back_after_s"] == 0
    assert answer["left"] == {}
    assert fleet.served("engine-0") == fleet.served("engine-1") == fleet.version
    assert fleet.said().count("engine-1 was left behind in ") == 1
    assert fleet.said().count(f"engine-1 is back with version {fleet.version} after ") == 1


def test_an_engine_that_was_frozen_in_a_load_is_dirty_until_it_is_refitted(fleet: Fleet) -> None:
    fleet.refit()
    victim = fleet.members["engine-1"]
    victim.hold("load")
    fleet.go()
    victim.await_held()
    victim.engine.kill(signal.SIGSTOP)
    victim.release()
    answer = fleet.answer()
    assert set(answer["reports"]) == {"engine-0"}
    victim.engine.kill(signal.SIGCONT)
    # It ends the load that it was in, and then the session: its weights are a version that nobody verified.
    deadline = time.monotonic() + WATCHDOG_S
    while victim.state().step is not Step.DIRTY:
        assert time.monotonic() < deadline, victim.state()
    assert fleet.served("engine-1") is None
    fleet.heal()
    assert fleet.served("engine-1") == fleet.version


def test_the_last_engine_is_waited_for(fleet: Fleet) -> None:
    fleet.refit()
    fleet.members["engine-0"].engine.stop()
    assert set(fleet.refit()["reports"]) == {"engine-1"}
    fleet.members["engine-1"].engine.stop()
    fleet.go()  # there is nobody to go on with
    fleet.members["engine-1"].start()
    assert set(fleet.answer()["reports"]) == {"engine-1"}
    assert fleet.served("engine-1") == 3
    fleet.members["engine-0"].start()
    fleet.heal()
    assert fleet.served("engine-0") == fleet.served("engine-1") == fleet.version
