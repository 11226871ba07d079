"""The digest of what is in: the same for the same weights, and nothing that differs gets in under one name."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncstack.errors import LoadFailed
from syncstack.facts import say_hello
from syncstack.refit.control import Control
from syncstack.refit.messages import BeginRequest, StepRequest, WorkerInfo
from syncstack.refit.state import EngineState, Step
from syncstack.settings import PauseMode
from syncstack.weights.manifest import TensorSlot, content_digest

SESSION = "0123456789abcdef" * 2
ROWS = [
    (TensorSlot(name=f"layer.{n}", dtype="bfloat16", shape=(n, 2), offset=64 * n, nbytes=4 * n), f"{n:016x}")
    for n in range(5)
]


@given(st.permutations(ROWS), st.integers(0, 1 << 20))
def test_order_and_place_do_not_matter(rows: list[tuple[TensorSlot, str]], shift: int) -> None:
    moved = [(msgspec.structs.replace(slot, offset=slot.offset + shift), found) for slot, found in rows]
    assert content_digest(moved) == content_digest(ROWS)


@pytest.mark.parametrize("change", [{"name": "other"}, {"dtype": "float16"}, {"shape": (2, 3)}, None])
def test_name_dtype_shape_and_content_do(change: dict[str, Any] | None) -> None:
    slot, found = ROWS[3]
    row = (slot, "f" * 16) if change is None else (msgspec.structs.replace(slot, **change), found)
    others = [each for each in ROWS if each[0] is not slot]
    assert content_digest([*others, row]) != content_digest(ROWS)
    assert content_digest(others) != content_digest(ROWS)


class TwoWorkers:
    """An engine of two workers that say what they verified."""

    kind, kind_version, model, dtype, tensors = "reference", "1", "none", "float32", ()

    def __init__(self, *manifests: str) -> None:
        self.manifests = manifests

    async def call_workers(self, op: str, session: str, expect: str, deadline_s: float) -> list[dict[str, Any]]:
        del session, expect, deadline_s
        return [{"manifest": each} if op == "verify" else {} for each in self.manifests]

    async def pause(self, mode: PauseMode) -> None: ...

    async def publish(self, version: int) -> None: ...

    async def resume(self) -> None: ...


async def refit(host: TwoWorkers, state: EngineState) -> None:
    workers = tuple(WorkerInfo(socket="", hello=say_hello("engine", rank=rank)) for rank in range(2))
    control = Control(name="e", host=host, state=state, workers=workers, heartbeat_s=1.0, stall_s=60.0)
    await control.begin(BeginRequest(session=SESSION, version=3, tensors=()))
    for step in ("pause", "load", "verify", "commit", "resume"):
        assert state.manifest == "" or state.version == 3, "told before it was in"
        await control.step(step, StepRequest(session=SESSION))


def test_an_engine_says_the_manifest_of_its_version_from_commit_on() -> None:
    state = EngineState()
    state.started()
    asyncio.run(refit(TwoWorkers("aa", "aa"), state))
    assert (state.report().version, state.report().manifest) == (3, "aa")


def test_workers_that_verified_different_weights_leave_their_engine_dirty() -> None:
    state = EngineState()
    state.started()
    with pytest.raises(LoadFailed, match=r"different weights \(observed: aa, bb\)"):
        asyncio.run(refit(TwoWorkers("aa", "bb"), state))
    assert (state.step, state.version, state.manifest) == (Step.DIRTY, 0, "")
    assert not state.accepts_requests
