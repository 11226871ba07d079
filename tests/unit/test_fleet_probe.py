"""A probe of real servers, and engines' processes that are ended whatever state they are in."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from syncstack.fleet.probe import Answer, NoAnswer, Probe
from syncstack.fleet.supervised import EngineProcess


class Handler(BaseHTTPRequestHandler):
    """Answers as the class says; keeps what it was asked."""

    models: ClassVar[bytes | None] = None
    status: ClassVar[int] = 200
    headers_: ClassVar[dict[str, str]] = {}
    body: ClassVar[bytes] = b"{}"
    wait_s: ClassVar[float] = 0.0
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._answer(404 if self.models is None else 200, {}, self.models or b"")

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        time.sleep(self.wait_s)
        self._answer(self.status, self.headers_, self.body)

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked may have given up
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[tuple[type[Handler], str]]:
    kind = type("Answers", (Handler,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield kind, f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def refusal(kind: str, message: str = "half of it") -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "code": 503}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "answer"),
    [
        (200, b"{}", Answer(version=7, serves=True)),
        (503, refusal("engine_updating"), Answer(version=7, serves=False)),
        (503, refusal("engine_dirty"), Answer(version=7, serves=False, dirty="half of it")),
    ],
)
def test_what_an_engine_says(server: tuple[type[Handler], str], status: int, body: bytes, answer: Answer) -> None:
    kind, url = server
    kind.status, kind.body, kind.headers_ = status, body, {"X-Syncstack-Version": "7"}
    probe = Probe(url, 5)
    assert [probe.ask(), probe.ask()] == [answer, answer]
    probe.close()
    assert kind.asked == [{"prompt": [1], "max_tokens": 1, "temperature": 0.0}] * 2


def test_it_asks_for_the_model_that_is_served(server: tuple[type[Handler], str]) -> None:
    kind, url = server
    kind.models, kind.headers_ = b'{"data": [{"id": "a/b"}]}', {"X-Syncstack-Version": "0"}
    probe = Probe(url, 5)
    probe.ask()
    probe.close()
    assert kind.asked[0]["model"] == "a/b"


@pytest.mark.parametrize(
    ("status", "version", "body", "models", "says"),
    [
        (200, None, b"{}", None, "status 200 without a version"),
        (200, "-1", b"{}", None, "status 200 without a version"),
        (500, "3", b"it broke", None, "status 500: it broke"),
        (503, "3", b"<html>", None, "status 503: <html>"),
        (200, "3", b"{}", b"[]", "/v1/models: "),
        (200, "3", b"{}", b"no json", "/v1/models: "),
    ],
)
def test_what_is_no_answer(
    server: tuple[type[Handler], str], status: int, version: str | None, body: bytes, models: bytes | None, says: str
) -> None:
    kind, url = server
    kind.status, kind.body, kind.models = status, body, models
    kind.headers_ = {} if version is None else {"X-Syncstack-Version": version}
    probe = Probe(url, 5)
    with pytest.raises(NoAnswer, match=says):
        probe.ask()
    probe.close()


def test_a_server_that_takes_connections_and_does_nothing_is_no_answer(server: tuple[type[Handler], str]) -> None:
    kind, url = server
    kind.wait_s = 1.0
    probe = Probe(url, 0.2)
    with pytest.raises(NoAnswer, match="ReadTimeout"):
        probe.ask()
    probe.close()


def make(tmp_path: Path, code: str) -> EngineProcess:
    argv = [sys.executable, "-c", code]
    return EngineProcess("e", address="unix:/none", url="http://none", argv=argv, env={}, log=tmp_path / "log")


CHILDREN = """
import os, sys, time
child = os.fork()
if child: print(child, flush=True)
{}
time.sleep(600)
"""


def child_of(tmp_path: Path) -> int:
    deadline = time.monotonic() + 10
    while not (text := (tmp_path / "log").read_text() if (tmp_path / "log").exists() else "").endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(text)


def gone(pid: int) -> bool:
    """Ended; it may wait to be reaped by whoever inherits it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("state", ["running", "stopped", "ended"])
def test_a_kill_ends_the_workers_too_whatever_state_the_server_is_in(tmp_path: Path, state: str) -> None:
    engine = make(tmp_path, CHILDREN.format("if child: sys.exit(4)" if state == "ended" else ""))
    assert engine.ended() == "it was never started"
    engine.kill()
    engine.start()
    child = child_of(tmp_path)
    assert engine.pid is not None
    if state == "stopped":
        os.killpg(engine.pid, signal.SIGSTOP)
    if state == "ended":
        deadline = time.monotonic() + 10
        while not engine.ended():
            assert time.monotonic() < deadline
        assert engine.ended() == "its process ended with 4"
        assert Path(f"/proc/{engine.pid}").exists(), "somebody else may have its number by now"
    else:
        assert engine.ended() == ""
    assert not gone(child)
    engine.kill()
    engine.kill()
    deadline = time.monotonic() + 10
    while not gone(child):
        assert time.monotonic() < deadline
    assert engine.ended().startswith("its process")
    assert not Path(f"/proc/{engine.pid}").exists()


def test_a_signal_is_named_and_a_start_after_it_is_another_process(tmp_path: Path) -> None:
    engine = make(tmp_path, "import time; print(1, flush=True); time.sleep(600)")
    engine.start()
    before = engine.pid
    assert before is not None
    child_of(tmp_path)
    os.kill(before, signal.SIGSEGV)
    deadline = time.monotonic() + 10
    while not engine.ended():
        assert time.monotonic() < deadline
    assert engine.ended() == "its process was ended by signal 11"
    engine.start()
    assert engine.ended() == ""
    assert engine.pid != before
    engine.kill()
