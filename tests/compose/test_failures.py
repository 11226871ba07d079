"""A stack that fails to come up or is interrupted: the reason, a non-zero exit, and nothing left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.compose.stack import ROOT, containers, run
from tests.ports import free_port


@pytest.fixture
def variables(project: str, tmp_path: Path) -> dict[str, str]:
    """A project of the test run's own, so that the prepared model is there already."""
    return {"PROJECT": project, "PORT": str(free_port()), "OUT": str(tmp_path), "STEPS": "1"}


def test_engine_that_ends_while_starting(variables: dict[str, str]) -> None:
    result = run("docker/up", timeout_s=600, ENGINE_ARGS="--no-such-option", **variables)
    last = result.stdout.splitlines()[-1]
    assert result.returncode == 1, result.stdout
    assert last.startswith("error: the engine ended while starting (exit status "), result.stdout
    assert "no-such-option" in last
    assert containers(variables["PROJECT"]) == []


def test_one_engine_of_several_that_ends_while_starting(variables: dict[str, str]) -> None:
    result = run("docker/up", timeout_s=600, LAYOUT="disagg", ENGINE_ARGS="--no-such-option", **variables)
    assert result.returncode == 1, result.stdout
    assert (
        "error: too few engines live (observed: engine-0 dead its process ended with 2; engine-1 dead" in result.stdout
    )
    for name in ("engine-0", "engine-1"):
        assert re.search(f"^the first error of {name}'s log: .*no-such-option", result.stdout, re.MULTILINE)
    assert containers(variables["PROJECT"]) == []
    assert not list((ROOT / ".run").glob(f"{variables['PROJECT']}*")), "the token was left"


def test_engine_that_is_not_ready_in_time(variables: dict[str, str]) -> None:
    result = run("docker/up", timeout_s=600, ENGINE_TIMEOUT="2", **variables)
    assert result.returncode == 1, result.stdout
    assert result.stdout.splitlines()[-1].startswith("error: the engine was not ready within 2 s (ENGINE_TIMEOUT)")
    assert containers(variables["PROJECT"]) == []


def test_model_that_cannot_be_read(variables: dict[str, str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"not safetensors")
    result = run("docker/up", timeout_s=600, MODEL=str(model), **variables)
    errors = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2, result.stdout
    assert len(errors) == 1, result.stdout
    assert "model.safetensors" in errors[0]
    assert containers(variables["PROJECT"]) == []


def test_interrupt(variables: dict[str, str]) -> None:
    process = subprocess.Popen(
        ["make", "up-colocated"],
        cwd=ROOT,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        # Whoever runs the tests may have SIGINT ignored, which a child inherits and bash then cannot trap.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("starting engine"):
            break
    os.killpg(process.pid, signal.SIGINT)  # what the terminal does on Ctrl-C
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert containers(variables["PROJECT"]) == []
