"""An engine's record in any order of what can happen to it."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncstack.fleet.states import EngineRecord, Policy, State
from syncstack.settings import Settings

POLICY = Policy(
    first_wait_s=30, interval_s=1, misses=3, backoff_s=2, backoff_max_s=8, restarts=3, window_s=100, start_tries=9
)

ALLOWED = {
    State.STARTING: {State.STALE, State.HEALTHY, State.DIRTY, State.DEAD},
    State.RESTARTING: {State.STALE, State.HEALTHY, State.DIRTY, State.DEAD},
    State.STALE: {State.HEALTHY, State.UPDATING, State.DIRTY, State.DEAD},
    State.HEALTHY: {State.STALE, State.UPDATING, State.DIRTY, State.DEAD},
    State.DIRTY: {State.STALE, State.HEALTHY, State.UPDATING, State.DEAD},
    State.UPDATING: {State.HEALTHY, State.STALE, State.DIRTY, State.DEAD},
    State.DEAD: {State.RESTARTING},
}


class Record(RuleBasedStateMachine):
    """A fleet of one engine, with a clock of its own. ``sent`` is the newest version that any refit has begun."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.published: int | None = None
        self.sent = 0
        self.starts: list[float] = []
        self.record = EngineRecord("engine-0", POLICY, self.now)
        self.before = self.record.state

    @rule(seconds=st.floats(0.1, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data(), serves=st.booleans())
    def answers(self, data: st.DataObject, serves: bool) -> None:
        version = data.draw(st.integers(0, self.sent))
        self.record.answered(version, self.now, published=self.published, serves=serves)
        if self.record.state is State.HEALTHY:
            assert serves
            assert version == self.published

    @rule()
    def says_dirty(self) -> None:
        self.record.refused("half of version 3", self.now)

    @rule()
    def misses(self) -> None:
        coming = self.record.state in (State.STARTING, State.RESTARTING)
        early = self.now - self.record.since < POLICY.first_wait_s
        before = self.record.misses
        self.record.missed("timed out", self.now)
        if coming and early:
            assert self.record.state is not State.DEAD, "it was not given its time to start"
        elif not coming and before + 1 >= POLICY.misses:
            assert self.record.state is State.DEAD

    @rule()
    def ends(self) -> None:
        self.record.ended("its process ended with 1", self.now)
        assert self.record.state is State.DEAD
        assert self.record.reason

    @rule(succeeds=st.booleans())
    def refit(self, succeeds: bool) -> None:
        self.sent += 1
        took_part = self.record.state in (State.HEALTHY, State.STALE, State.DIRTY, State.UPDATING)
        self.record.updating(self.now)
        assert (self.record.state is State.UPDATING) == took_part
        if succeeds and took_part:
            self.published = self.sent
            self.record.updated(self.sent, self.now)
            assert (self.record.state, self.record.version) == (State.HEALTHY, self.sent)
        else:
            self.record.passed(self.now)
            assert self.record.state is not State.UPDATING

    @precondition(lambda self: self.record.state is State.DEAD)
    @rule()
    def restarts(self) -> None:
        if not self.record.may_restart(self.now):
            return
        recent = [at for at in self.starts if self.now - at < POLICY.window_s]
        assert len(recent) < POLICY.restarts, "its budget is spent"
        assert self.now - self.record.since >= min(POLICY.backoff_s, POLICY.backoff_max_s)
        self.starts.append(self.now)
        self.record.restarting(self.now)
        assert self.record.version is None

    @precondition(lambda self: self.record.state is State.DEAD)
    @rule()
    def its_node_is_away(self) -> None:
        before = self.record.restarts, self.record.lost
        self.record.postponed("no node", self.now)
        assert (self.record.restarts, self.record.lost) == before
        assert not self.record.may_restart(self.now)

    @invariant()
    def every_transition_is_in_the_table(self) -> None:
        if not hasattr(self, "record"):
            return
        found = self.record.snapshot()
        assert found.state is self.before or found.state in ALLOWED[self.before], (self.before, found.state)
        assert found.version is None or found.version <= self.sent
        assert found.since <= self.now
        assert bool(found.reason) == (found.state in (State.DEAD, State.DIRTY))
        self.before = found.state


TestRecord = Record.TestCase


def dead(times: int, now: float) -> EngineRecord:
    record = EngineRecord("engine-0", POLICY, now)
    for _ in range(times):
        record.ended("it ended", now)
        now += POLICY.backoff_max_s
        assert record.may_restart(now)
        record.restarting(now)
    record.ended("it ended", now)
    return record


def test_each_restart_waits_twice_as_long_as_the_one_before() -> None:
    for times, wait in ((0, 2.0), (1, 4.0), (2, 8.0)):
        record = dead(times, 0.0)
        assert not record.may_restart(record.since + wait - 0.01)
        assert record.may_restart(record.since + wait)


def test_restarts_that_are_spent_come_back_with_time() -> None:
    record = dead(3, 0.0)
    assert record.lost
    assert not record.may_restart(record.since + 50)
    assert record.may_restart(record.since + POLICY.window_s)
    assert not record.lost


def test_only_a_dead_engine_is_started_again() -> None:
    with pytest.raises(ValueError, match="engine-0 is starting"):
        EngineRecord("engine-0", POLICY, 0.0).restarting(1.0)


def test_one_that_has_never_answered_is_started_twice_and_no_more() -> None:
    record = EngineRecord("engine-0", Policy(restarts=5, backoff_s=0, start_tries=2), 0.0)
    record.ended("its process ended with 2", 0.0)
    assert not record.lost
    record.restarting(1.0)
    record.ended("its process ended with 2", 2.0)
    assert record.lost
    assert not record.may_restart(100.0)


def test_one_that_has_answered_has_its_whole_budget() -> None:
    record = EngineRecord("engine-0", Policy(restarts=5, backoff_s=0, start_tries=1), 0.0)
    record.answered(0, 0.0, published=None, serves=False)
    for now in range(5):
        record.ended("it ended", now)
        assert not record.lost
        record.restarting(now)
    record.ended("it ended", 6.0)
    assert record.lost


def test_a_node_that_is_away_for_long_costs_no_restart() -> None:
    record = EngineRecord("engine-0", Policy(restarts=2, backoff_s=1), 0.0)
    record.answered(0, 0.0, published=None, serves=False)
    record.ended("its node is gone", 0.0)
    for now in range(2, 200, 2):
        assert record.may_restart(now)
        record.postponed("its node is gone", now)
    assert not record.lost
    record.restarting(202.0)
    assert record.restarts == 1


def test_the_policy_of_no_settings_is_the_default() -> None:
    assert Policy.of(Settings.load()) == Policy()
