"""Engines that come back, or join, while the trainer is at its next step: all real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.process.fleet import WATCHDOG_S, Fleet
from tests.process.warm import Warm

BOTH = {"engine-0", "engine-1"}


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Any, warm: Warm) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), model, warm, SYNCSTACK_KEEP_VERSION="true")
    yield made
    made.close()


class Asking:
    """Asks an engine over and over; a refusal is counted."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.answers: list[int | None] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(fleet, name))
        self._thread.start()

    def _ask(self, fleet: Fleet, name: str) -> None:
        while not self._over.wait(0.02):
            self.answers.append(fleet.served(name))

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def await_current(fleet: Fleet, names: set[str]) -> None:
    deadline = time.monotonic() + WATCHDOG_S
    while set((answer := fleet.tell("who"))["current"]) != names:
        assert time.monotonic() < deadline, (answer, fleet.said()[-3000:])
        time.sleep(0.1)


def test_d40_an_engine_that_comes_back_is_brought_to_the_current_version_between_two_refits(fleet: Fleet) -> None:
    assert fleet.tell("who")["current"] == []
    assert set(fleet.refit()["reports"]) == BOTH
    victim = fleet.members["engine-1"]
    victim.engine.kill()
    assert set(fleet.refit()["reports"]) == {"engine-0"}
    assert fleet.tell("spoil")["current"] == ["engine-0"]  # the trainer is in the middle of its next step

    asking = Asking(fleet, "engine-0")
    try:
        victim.restart()
        assert victim.engine.complete().status_code in (200, 503)
        await_current(fleet, BOTH)
    finally:
        asking.close()
    assert set(asking.answers) == {2}, "the other engine stopped for it"
    assert fleet.served("engine-1") == 2  # with the weights of that version, and not with what the trainer has now
    states = [{member.state().manifest for member in fleet.members.values()}]
    assert fleet.tell("who")["left"] == {}
    said = fleet.said()
    assert said.count("engine-1 is back with version 2 after ") == 1

    answer = fleet.refit()
    assert set(answer["reports"]) == BOTH
    assert answer["reports"]["engine-1"]["back_after_s"] == 0
    assert fleet.served("engine-0") == fleet.served("engine-1") == 3
    states.append({member.state().manifest for member in fleet.members.values()})
    assert [len(each) for each in states] == [1, 1], "what came by another way is something else"
    assert states[0] != states[1]


def test_an_engine_joins_and_leaves_while_training_goes_on(fleet: Fleet) -> None:
    fleet.refit()
    added = fleet.add("engine-2")
    assert fleet.served("engine-2") is None
    fleet.tell(f"join {added.address}")
    await_current(fleet, {*BOTH, "engine-2"})
    assert fleet.served("engine-2") == 1
    assert set(fleet.refit()["reports"]) == {*BOTH, "engine-2"}

    fleet.tell("part engine-2")
    answer = fleet.refit()
    assert set(answer["reports"]) == BOTH
    assert answer["left"] == {}
    assert fleet.served("engine-2") == 2, "it keeps what it has, and says so"


def test_one_that_joins_and_dies_at_once_disturbs_nobody(fleet: Fleet) -> None:
    fleet.refit()
    added = fleet.add("engine-2")
    added.hold("load")
    fleet.tell(f"join {added.address}")
    added.await_held()
    added.engine.kill()
    assert set(fleet.refit()["reports"]) == BOTH
    added.release()
    added.restart()
    fleet.heal()  # nothing was kept while the version before was still on its way to it
    assert {fleet.served(name) for name in fleet.members} == {fleet.version}
