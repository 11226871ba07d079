"""The gate before an engine's routes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from syncstack.refit.gate import Gate
from syncstack.refit.state import EngineState, Step


async def ask(state: EngineState, path: str = "/v1/completions") -> httpx.Response:
    async def answer(_: Any) -> PlainTextResponse:
        return PlainTextResponse("served")

    app = Starlette(routes=[Route(each, answer) for each in ("/v1/completions", "/health", "/anything")])
    app.add_middleware(Gate, state=state)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine") as client:
        return await client.get(path)


def run(state: EngineState, path: str = "/v1/completions") -> httpx.Response:
    import asyncio

    return asyncio.run(ask(state, path))


def serving(version: int = 0) -> EngineState:
    state = EngineState()
    state.started()
    state.version = version
    return state


def test_a_served_answer_names_its_version() -> None:
    response = run(serving(7))
    assert (response.status_code, response.text) == (200, "served")
    assert response.headers["x-syncstack-version"] == "7"


@pytest.mark.parametrize("path", ["/v1/completions", "/anything"])
def test_an_updating_engine_says_try_again(path: str) -> None:
    state = serving()
    state.begin(1, "one")
    state.advance(Step.PAUSED, "one")
    response = run(state, path)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["type"] == "engine_updating"


def test_a_held_engine_says_what_it_waits_for() -> None:
    state = EngineState()
    state.started(held=True)
    response = run(state)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "the engine waits for its first refit" in response.json()["error"]["message"]
    assert run(state, "/health").status_code == 200


def test_a_dirty_engine_says_why_and_not_to_try_again() -> None:
    state = serving()
    state.begin(1, "one")
    state.advance(Step.PAUSED, "one")
    state.advance(Step.LOADING, "one")
    state.abort("the power failed")
    response = run(state)
    assert response.status_code == 503
    assert "retry-after" not in response.headers
    assert "the power failed" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_starting_engine_serves_nothing_and_is_not_healthy(path: str) -> None:
    assert run(EngineState(), path).status_code == 503


def test_a_dirty_engine_is_healthy_and_one_that_no_trainer_reaches_is_not() -> None:
    state = serving(3)
    state.taint("a test")
    assert run(state, "/health").status_code == 200  # only a refit heals it, no restart
    state.reachable = False
    response = run(state, "/health")
    assert (response.status_code, response.json()["error"]["type"]) == (503, "engine_unreachable")
    assert "x-syncstack-version" not in response.headers
