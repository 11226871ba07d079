"""The state machine of an engine's weights: what may follow what, and what must never be."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from syncstack.errors import EngineBusy, EngineDirty, ProtocolError, SyncstackError
from syncstack.refit.state import EngineState, Step

ORDER = (Step.PAUSED, Step.LOADING, Step.VERIFIED, Step.COMMITTED)


def at(step: Step | None) -> EngineState:
    """A state at version 0 with version 1 open and advanced to ``step`` (None: just open)."""
    state = EngineState()
    state.started()
    state.begin(1, "one")
    for each in ORDER if step else ():
        state.advance(each, "one")
        if each is step:
            break
    return state


def test_a_whole_refit() -> None:
    state = at(Step.COMMITTED)
    assert (state.version, state.accepts_requests) == (1, False)
    state.resume("one")
    assert (state.step, state.version, state.accepts_requests) == (Step.SERVING, 1, True)


def test_requests_go_on_while_bytes_move_beside_the_engine() -> None:
    assert at(None).accepts_requests
    assert not at(Step.PAUSED).accepts_requests


def test_a_held_engine_serves_from_its_first_commit_on() -> None:
    state = EngineState()
    state.started(held=True)
    assert not state.accepts_requests
    state.begin(4, "lost")
    state.advance(Step.PAUSED, "lost")
    state.abort("its trainer died")
    assert (state.step, state.accepts_requests) == (Step.SERVING, False)
    state.begin(5, "one")
    for step in ORDER:
        assert not state.accepts_requests
        state.advance(step, "one")
    state.resume("one")
    assert (state.version, state.accepts_requests) == (5, True)


@pytest.mark.parametrize(
    ("step", "ends", "version"),
    [
        (None, Step.SERVING, 0),
        (Step.PAUSED, Step.SERVING, 0),
        (Step.LOADING, Step.DIRTY, 0),
        (Step.VERIFIED, Step.DIRTY, 0),
        (Step.COMMITTED, Step.SERVING, 1),
    ],
)
def test_d37_abort_at_every_step(step: Step | None, ends: Step, version: int) -> None:
    state = at(step)
    state.abort("the trainer died")
    assert (state.step, state.version) == (ends, version)
    assert state.accepts_requests is (ends is Step.SERVING)
    assert ("the trainer died" in state.reason) is (ends is Step.DIRTY)


def test_d38_a_dirty_engine_serves_again_only_after_a_full_refit() -> None:
    state = at(Step.LOADING)
    state.abort("first")
    with pytest.raises(EngineDirty, match="first"):
        state.check_session("one")
    state.begin(2, "two")
    assert not state.accepts_requests
    state.abort("second")
    assert state.step is Step.DIRTY
    state.begin(2, "three")
    for step in ORDER:
        state.advance(step, "three")
    state.resume("three")
    assert (state.version, state.accepts_requests, state.reason) == (2, True, "")


def test_e11_begin_twice_for_one_version_is_one_session_and_another_version_is_refused() -> None:
    state = at(None)
    state.begin(1, "again")
    state.check_session("again")
    with pytest.raises(EngineBusy, match="version 1"):
        state.begin(2, "other")
    assert state.target == 1


def test_a_starting_engine_takes_no_session() -> None:
    with pytest.raises(EngineBusy, match="still starting"):
        EngineState().begin(1, "one")


@pytest.mark.parametrize("step", [Step.LOADING, Step.VERIFIED, Step.COMMITTED])
def test_no_step_can_be_skipped(step: Step) -> None:
    state = at(None)
    with pytest.raises(ProtocolError, match="cannot follow"):
        state.advance(step, "one")
    with pytest.raises(ProtocolError):
        state.resume("one")
    assert state.step is Step.OPEN


class AnyOrder(RuleBasedStateMachine):
    """Whatever is called in whatever order: no mixture serves, and no version is ahead of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.state = EngineState()
        self.state.started()
        self.weights: int | None = 0  # the version that is really in; None: mixed
        self.next = 1

    def attempt(self, call: object, *args: object) -> bool:
        try:
            call(*args)  # type: ignore[operator]
        except SyncstackError:
            return False
        return True

    @rule(session=st.sampled_from("ab"), bump=st.booleans())
    def begin(self, session: str, bump: bool) -> None:
        self.next += bump
        self.attempt(self.state.begin, self.next, session)

    @rule(session=st.sampled_from("ab"), step=st.sampled_from(ORDER))
    def advance(self, session: str, step: Step) -> None:
        if self.attempt(self.state.advance, step, session):
            if step is Step.LOADING:
                self.weights = None
            if step is Step.VERIFIED:
                self.weights = self.state.target

    @rule(session=st.sampled_from("ab"))
    def resume(self, session: str) -> None:
        self.attempt(self.state.resume, session)

    @rule()
    def abort(self) -> None:
        self.state.abort("because")

    @invariant()
    def no_mixture_serves(self) -> None:
        if self.state.accepts_requests:
            assert self.weights == self.state.version

    @invariant()
    def a_dirty_engine_says_why(self) -> None:
        assert (self.state.step is not Step.DIRTY) or self.state.reason


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
