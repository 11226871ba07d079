"""``syncstack run``: bad input starts nothing, and every end of a run leaves a finished report."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from syncstack.errors import ModelFolderError, RefitFailed, UsageError
from syncstack.refit.metrics import metrics
from syncstack.run import cli, schema
from syncstack.run.cli import expose

JOB = "def main(ctx):\n    pass\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    header = b'{"x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return path


@pytest.fixture
def start(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with a body in place of engines and job; returns the exit status."""
    (tmp_path / "a_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])

    def go(body: Callable[..., Any]) -> int:
        monkeypatch.setattr(cli, "execute", lambda job, recorder, *rest, **options: body(recorder))
        before = signal.getsignal(signal.SIGTERM)
        try:
            cli.run(job="a_job:main", model=model, out=tmp_path / "out", layout="colocated")
        except SystemExit as end:
            return int(str(end.code))
        finally:
            assert signal.getsignal(signal.SIGTERM) is before
        return 0

    return go


def report(tmp_path: Path) -> schema.RunReport:
    return schema.read(tmp_path / "out" / "report.json")


def test_a_good_run(start: Callable[..., int], tmp_path: Path) -> None:
    assert start(lambda recorder: None) == 0
    assert report(tmp_path).outcome == schema.Outcome(status="ok")
    assert report(tmp_path).finished is not None
    assert report(tmp_path).facts.pidfd_getfd in ("ok", "denied", "absent")
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_failure_is_recorded_and_goes_on_up(start: Callable[..., int], tmp_path: Path) -> None:
    def fail(recorder: Any) -> None:
        with recorder.phase("refit"):
            raise RefitFailed("the refit\nfailed", phase="load", engine_state="dirty")

    with pytest.raises(RefitFailed):
        start(fail)
    outcome = report(tmp_path).outcome
    assert (outcome.status, outcome.phase) == ("failed", "refit: load")
    assert outcome.error == "the refit failed. The engine is dirty"


def test_an_unexpected_error_is_recorded_with_its_type(start: Callable[..., int], tmp_path: Path) -> None:
    def fail(recorder: Any) -> None:
        with recorder.phase("train"):
            raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        start(fail)
    assert report(tmp_path).outcome == schema.Outcome(
        status="failed", phase="train", error="ZeroDivisionError: by zero"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_130(start: Callable[..., int], tmp_path: Path, number: int) -> None:
    def wait(recorder: Any) -> None:
        with recorder.phase("rollout"):
            os.kill(os.getpid(), number)
            time.sleep(5)
            raise AssertionError("the signal did not end the run")

    assert start(wait) == 130
    outcome = report(tmp_path).outcome
    assert (outcome.status, outcome.phase) == ("interrupted", "rollout")


@pytest.mark.parametrize("name", ["nowhere.at.all:main", "a_job:other", "a_job", ":main", "a_job:JOB"])
def test_a_job_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "a_job.py").write_text("JOB = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "a_job", raising=False)
    with pytest.raises(UsageError, match="job"):
        cli.load_job(name)


def test_a_bad_model_folder_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError):
        cli.run(job="json:dumps", model=tmp_path / "none", out=tmp_path / "out", layout="x")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("urls", [None, ["http://a:8000"], ["http://a:8000"] * 3])
def test_each_engine_needs_its_url(tmp_path: Path, model: Path, urls: list[str] | None) -> None:
    pair = ["tcp://a:7000", "tcp://b:7000"]
    with pytest.raises(UsageError, match="each engine needs the URL of its API.*2 --engine, "):
        cli.run(job="json:dumps", model=model, out=tmp_path / "out", layout="x", engine=pair, engine_url=urls)
    assert not (tmp_path / "out").exists()
    assert cli.urls_of(pair, ["http://a:8000", "http://b:8000"]) == ["http://a:8000", "http://b:8000"]


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        cli.prepare_out(tmp_path / "file" / "out")


def test_the_options_are_those_that_the_page_names() -> None:
    from syncstack.cli import app

    text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).output
    for option in ("--engine", "--engine-url", "--steps", "--seed", "--out", "--model", "--layout"):
        assert option in text


def test_metrics_are_served_where_asked_and_a_port_that_is_taken_starts_nothing() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(UsageError, match=f"metrics cannot be served at 127.0.0.1:{port}"):
            expose(f"127.0.0.1:{port}")
    metrics().fallbacks.labels(transport="host_fd").inc()
    expose(f"127.0.0.1:{port}")
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    assert 'syncstack_transport_refused_total{transport="host_fd"} ' in text
    expose(None)
