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


async def ask(state: EngineState, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    async def answer(_: Any) -> PlainTextResponse:
        return PlainTextResponse("served")

    app = Starlette(routes=[Route(each, answer) for each in ("/v1/completions", "/health", "/anything")])
    app.add_middleware(Gate, state=state)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine") as client:
        return await client.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})


def run(state: EngineState, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    import asyncio

    return asyncio.run(ask(state, path, **headers))


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


def test_ready_is_who_would_serve_and_says_the_version() -> None:
    state = EngineState()
    assert run(state, "/ready").status_code == 503, "it starts"
    state.started(held=True)
    assert run(state, "/ready").json()["error"]["message"].startswith("the engine waits for its first refit")
    state.begin(7, "one")
    for step in (Step.PAUSED, Step.LOADING, Step.VERIFIED, Step.COMMITTED):
        state.advance(step, "one")
        assert run(state, "/ready").status_code == 503, step
    state.resume("one")
    response = run(state, "/ready")
    assert (response.status_code, response.text, response.headers["x-syncstack-version"]) == (200, "", "7")
    assert run(state, "/ready", x_syncstack_min_version="8").status_code == 503
    state.taint("lost")
    assert run(state, "/ready").status_code == 503
    assert state.in_flight == 0


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


class TestMinimumVersion:
    """A request says how old the weights may be that answer it."""

    @pytest.mark.parametrize("wanted", ["0", "6", "7"])
    def test_new_enough_weights_answer(self, wanted: str) -> None:
        response = run(serving(7), x_syncstack_min_version=wanted)
        assert (response.status_code, response.headers["x-syncstack-version"]) == (200, "7")

    def test_older_ones_refuse_and_say_which_they_are(self) -> None:
        response = run(serving(7), x_syncstack_min_version="8")
        assert (response.status_code, response.headers["x-syncstack-version"]) == (503, "7")
        assert "retry-after" not in response.headers, "nothing newer is on its way"
        error = response.json()["error"]
        assert error["type"] == "engine_stale"
        assert "serves version 7, and the request asks for 8 or later" in error["message"]

    @pytest.mark.parametrize(("wanted", "retry"), [("8", "1"), ("9", None)])
    def test_who_asks_for_what_is_on_its_way_may_wait(self, wanted: str, retry: str | None) -> None:
        state = serving(7)
        state.begin(8, "one")  # the bytes come while it serves
        response = run(state, x_syncstack_min_version=wanted)
        assert (response.status_code, response.headers.get("retry-after")) == (503, retry)

    @pytest.mark.parametrize("value", ["", "-1", "1.5", "seven", "1" * 17, "0x1", "7, 8"])
    def test_what_is_no_version_is_a_bad_request(self, value: str) -> None:
        response = run(serving(7), x_syncstack_min_version=value)
        assert response.status_code == 400
        assert "X-Syncstack-Min-Version is no version" in response.json()["error"]["message"]

    def test_reading_routes_answer_whatever_is_asked(self) -> None:
        assert run(serving(7), "/health", x_syncstack_min_version="9").status_code == 200
