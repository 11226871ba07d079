"""The trainer's client of the engine's API, against a real HTTP server that answers as engines do, well or badly."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from examples.grpo.rollout import EngineApi, Engines
from syncstack.errors import EngineError, EngineUnreachable

Reply = tuple[int, dict[str, str], dict[str, Any]]


class Server(ThreadingHTTPServer):
    """Answers with what ``replies`` holds next, or with ``reply(body)``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.queue: list[Reply] = []
        self.reply: Callable[[dict[str, Any]], Reply] = completion


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.answer((200, {}, {"data": [{"id": "the-model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.answer(self.server.queue.pop(0) if self.server.queue else self.server.reply(body))

    def answer(self, reply: Reply) -> None:
        status, headers, value = reply
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def completion(body: dict[str, Any]) -> Reply:
    """n completions whose first token is the prompt's first; out of order, as the API allows."""
    first = body["prompt"][0]
    choices = [
        {"index": i, "token_ids": [first, i], "logprobs": {"token_logprobs": [-0.5, -float(i)]}}
        for i in reversed(range(body["n"]))
    ]
    return 200, {"X-Syncstack-Version": "4"}, {"choices": choices}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def api(server: Server) -> Iterator[EngineApi]:
    api = EngineApi(f"http://127.0.0.1:{server.server_address[1]}/", timeout_s=5.0)
    yield api
    api.close()


def draw(api: EngineApi, **changes: Any) -> Any:
    options = {"n": 2, "max_tokens": 4, "stop_tokens": [0], "seed": 9, "version": 4}
    return Engines({"engine-0": api}).sample([[5, 6], [7]], names=["engine-0"], **{**options, **changes})


def test_samples_come_back_by_prompt_and_index(api: EngineApi, server: Server) -> None:
    groups = draw(api)
    assert [[s.tokens for s in group] for group in groups] == [[(5, 0), (5, 1)], [(7, 0), (7, 1)]]
    assert groups[0][1].logprobs == (-0.5, -1.0)
    assert {body["model"] for body in server.bodies} == {"the-model"}


def test_no_two_samples_of_a_batch_share_a_seed(api: EngineApi, server: Server) -> None:
    draw(api)
    seeds = [body["seed"] + i for body in server.bodies for i in range(2)]  # the engine adds the sample's index
    assert sorted(seeds) == [9, 10, 11, 12]


def test_the_distribution_is_not_cut(api: EngineApi, server: Server) -> None:
    draw(api)
    body = server.bodies[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["return_token_ids"]) == (1.0, 1.0, 0, True)


def test_it_waits_while_the_weights_move(api: EngineApi, server: Server) -> None:
    server.queue = [(503, {"Retry-After": "0"}, {"error": "updating"})] * 3
    assert len(draw(api)) == 2
    assert len(server.bodies) == 5


def test_a_dirty_engine_is_not_waited_for(api: EngineApi, server: Server) -> None:
    server.queue = [(503, {}, {"error": {"message": "weights may be mixed"}})] * 2
    with pytest.raises(EngineError, match="mixed"):
        draw(api)


def test_samples_of_another_version_are_refused(api: EngineApi) -> None:
    with pytest.raises(EngineError, match="version 4"):
        draw(api, version=5)


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 0, "logprobs": {"token_logprobs": [-1.0]}},
        {"index": 0, "token_ids": [], "logprobs": {"token_logprobs": []}},
        {"index": 0, "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}},
    ],
)
def test_an_answer_without_tokens_and_logprobs_is_refused(api: EngineApi, server: Server, choice: Any) -> None:
    server.reply = lambda body: (200, {}, {"choices": [choice]})
    with pytest.raises(EngineError, match="token"):
        draw(api, n=1)


def test_prompt_scores_skip_the_first_token(api: EngineApi, server: Server) -> None:
    entries = [None, {"6": {"logprob": -1.5}}, {"8": {"logprob": -9.0}, "7": {"logprob": -2.5}}]
    server.reply = lambda body: (200, {}, {"choices": [{"prompt_logprobs": entries}]})
    assert api.prompt_logprobs([5, 6, 7], version=None) == [-1.5, -2.5]


@pytest.fixture
def pair() -> Iterator[tuple[Engines, list[Server]]]:
    servers = [Server(), Server()]
    for each in servers:
        threading.Thread(target=each.serve_forever, args=(0.01,), daemon=True).start()
    urls = [f"http://127.0.0.1:{each.server_address[1]}" for each in servers]
    engines = Engines({f"engine-{index}": EngineApi(url, timeout_s=5.0) for index, url in enumerate(urls)})
    yield engines, servers
    engines.close()
    for each in servers:
        each.shutdown()
        each.server_close()


PROMPTS = [[number, 0] for number in range(10, 16)]
NAMES = ["engine-0", "engine-1"]
OPTIONS: dict[str, Any] = {"names": NAMES, "n": 2, "max_tokens": 4, "stop_tokens": [0], "seed": 9, "version": 4}


def seeds(servers: list[Server]) -> list[list[int]]:
    return [sorted(body["seed"] for body in each.bodies) for each in servers]


def test_an_engine_that_was_left_behind_gets_no_prompt(pair: tuple[Engines, list[Server]]) -> None:
    engines, servers = pair
    engines.sample(PROMPTS, **{**OPTIONS, "names": ["engine-1"]})
    assert seeds(servers) == [[], [9, 11, 13, 15, 17, 19]]


def test_prompts_are_spread_over_the_engines_with_the_seeds_of_one(pair: tuple[Engines, list[Server]]) -> None:
    engines, servers = pair
    groups = engines.sample(PROMPTS, **OPTIONS)
    assert [group[0].tokens[0] for group in groups] == [10, 11, 12, 13, 14, 15]
    assert seeds(servers) == [[9, 13, 17], [11, 15, 19]]


@pytest.mark.parametrize("fault", ["gone", "stale", "dirty"])
def test_an_engine_that_cannot_serve_the_version_leaves_its_prompts_to_the_others(
    pair: tuple[Engines, list[Server]], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    engines, servers = pair
    if fault == "gone":
        servers[0].shutdown()
        servers[0].server_close()
    elif fault == "stale":
        servers[0].reply = lambda body: (200, {"X-Syncstack-Version": "3"}, completion(body)[2])
    else:
        servers[0].reply = lambda body: (503, {}, {"error": {"message": "weights may be mixed"}})
    for _ in range(2):
        groups = engines.sample(PROMPTS, **OPTIONS)
        assert [group[0].tokens[0] for group in groups] == [10, 11, 12, 13, 14, 15]
    assert seeds(servers)[1] == sorted([9, 11, 13, 15, 17, 19] * 2)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "engine-0 gets no more prompts of this step"
    ]
    servers[1].reply = lambda body: (200, {"X-Syncstack-Version": "3"}, completion(body)[2])
    with pytest.raises((EngineError, EngineUnreachable)):
        engines.sample(PROMPTS, **OPTIONS)


def test_every_engine_scores_the_fixed_text(pair: tuple[Engines, list[Server]]) -> None:
    engines, servers = pair
    for number, each in enumerate(servers):
        value = {"choices": [{"prompt_logprobs": [None, {"6": {"logprob": -1.0 - number}}]}]}
        each.reply = lambda body, value=value: (200, {"X-Syncstack-Version": "4"}, value)  # type: ignore[misc]
    assert engines.prompt_logprobs([5, 6], names=NAMES, version=4) == {"engine-0": [-1.0], "engine-1": [-2.0]}
    assert engines.prompt_logprobs([5, 6], names=["engine-1"], version=4) == {"engine-1": [-2.0]}
    with pytest.raises(EngineError, match="version 4"):
        engines.prompt_logprobs([5, 6], names=NAMES, version=5)
    servers[0].shutdown()
    servers[0].server_close()
    assert engines.prompt_logprobs([5, 6], names=NAMES, version=4) == {"engine-1": [-2.0]}
    with pytest.raises(EngineUnreachable):
        engines.prompt_logprobs([5, 6], names=["engine-0"], version=4)


def test_an_engine_that_is_gone(server: Server) -> None:
    port = server.server_address[1]
    server.server_close()
    api = EngineApi(f"http://127.0.0.1:{port}", timeout_s=1.0)
    with pytest.raises(EngineUnreachable, match="did not answer"):
        api.model()
    api.close()
