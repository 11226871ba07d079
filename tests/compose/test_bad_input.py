"""Bad input to `make up-colocated` and `make up-disagg`: one clear line, exit 2, and nothing was started."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.compose.stack import containers, run

PROJECT = f"syncstack-bad-{os.getpid()}"


def refused(expected: str, **variables: str) -> None:
    """docker/up must refuse with one line that holds ``expected``."""
    result = run("docker/up", PROJECT=PROJECT, **variables)
    assert result.returncode == 2, result.stdout
    assert len(result.stdout.splitlines()) == 1, result.stdout
    assert result.stdout.startswith("error: ")
    assert expected in result.stdout


@pytest.fixture(autouse=True)
def nothing_started(docker: None) -> None:
    """After each test: no container of this project, not even an ended one."""
    assert containers(PROJECT) == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder whose index names two shards, of which one is there."""
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    return tmp_path


def test_unknown_profile() -> None:
    refused("SECCOMP names no profile (observed: strict; expected: permissive", SECCOMP="strict")


@pytest.mark.parametrize("variable", ["STEPS", "PORT", "THREADS", "ENGINE_TIMEOUT"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "9; true"])
def test_not_a_positive_number(variable: str, value: str) -> None:
    refused(f"{variable} is not a positive number (observed: {value})", **{variable: value})


def test_port_beyond_the_last() -> None:
    refused("PORT", PORT="65536")


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_engines_that_are_no_number(value: str) -> None:
    refused(f"ENGINES is not a positive number (observed: {value})", LAYOUT="disagg", ENGINES=value)


def test_more_engines_than_there_are() -> None:
    refused("ENGINES is more than compose.yaml has (observed: 9; expected: at most 8)", LAYOUT="disagg", ENGINES="9")


def test_several_engines_colocated() -> None:
    refused("the colocated layout has one engine (observed: ENGINES=2). Next: make up-disagg", ENGINES="2")


def test_unknown_layout() -> None:
    refused("LAYOUT names no layout (observed: apart; expected: colocated or disagg)", LAYOUT="apart")


def test_unknown_dtype() -> None:
    refused("DTYPE is not a dtype of an engine (observed: fp8;", DTYPE="fp8")


def test_seed_is_no_number() -> None:
    refused("SEED is not a number", SEED="abc")


def test_model_is_not_a_folder(tmp_path: Path) -> None:
    refused("MODEL is not a folder", MODEL=str(tmp_path / "absent"))


def test_model_without_config(tmp_path: Path) -> None:
    refused("MODEL has no config.json", MODEL=str(tmp_path))


def test_model_with_a_missing_shard(model: Path) -> None:
    refused("missing: model-00002-of-00002.safetensors", MODEL=str(model))


def test_model_without_weights(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    refused("missing: model.safetensors", MODEL=str(model))


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        refused(f"port {port} is taken", PORT=port)


def path_with(tmp_path: Path, docker: str | None) -> str:
    """A PATH with the tools docker/up needs, and a docker that answers as the script says, or none."""
    for tool in [
        "bash",
        "cat",
        "cksum",
        "cut",
        "date",
        "dirname",
        "git",
        "grep",
        "head",
        "nproc",
        "sort",
        "tail",
        "timeout",
    ]:
        for folder in os.environ["PATH"].split(os.pathsep):
            if (Path(folder) / tool).exists():
                (tmp_path / tool).symlink_to(Path(folder) / tool)
                break
    if docker is not None:
        (tmp_path / "docker").write_text(f"#!/bin/bash\n{docker}\n")
        (tmp_path / "docker").chmod(0o755)
    return str(tmp_path)


def test_docker_missing(tmp_path: Path) -> None:
    refused("docker is not installed", PATH=path_with(tmp_path, None))


def test_engine_does_not_answer() -> None:
    refused("the Docker engine does not answer: ", DOCKER_HOST="unix:///nonexistent/docker.sock")


# An old compose cannot be had here, so docker is a script in these two: only its answer about the version matters.
def test_compose_too_old(tmp_path: Path) -> None:
    old = 'if [ "$1" = compose ]; then echo v2.24.3; fi'
    refused("too old (observed: 2.24.3; expected: 2.24.4 or newer)", PATH=path_with(tmp_path, old))


def test_compose_missing(tmp_path: Path) -> None:
    none = 'if [ "$1" = compose ]; then exit 1; fi'
    refused("no compose plugin", PATH=path_with(tmp_path, none))


@pytest.mark.parametrize("target", ["up-colocated", "up-disagg"])
def test_make_passes_the_exit_on(target: str) -> None:
    result = run("make", target, SECCOMP="strict", PROJECT=PROJECT)
    assert result.returncode == 2
    assert "error: SECCOMP names no profile" in result.stdout
