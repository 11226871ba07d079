"""Fixtures of the container tests. Everything here is real: images, engine, model, training."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.compose.stack import ROOT, STARTED, Stack, check, free_port, run

PROJECT = f"syncstack-test-{os.getpid()}"
UP_DEADLINE_S = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder; the first test of a profile waits for its stack, so the usual limit is too short."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "compose"):
            item.add_marker(pytest.mark.compose)
            item.add_marker(pytest.mark.timeout(UP_DEADLINE_S + 120))


@pytest.fixture(scope="session", autouse=True)
def docker() -> None:
    """Skip where there is no engine to ask; whatever else is missing is a failure."""
    try:
        result = run("docker", "info", timeout_s=30)
    except FileNotFoundError:
        pytest.skip("docker is not installed")
    if result.returncode:
        pytest.skip(f"docker info does not answer: {result.stdout.strip().splitlines()[-1]}")


@pytest.fixture(scope="session")
def project(docker: None) -> Iterator[str]:
    """A compose project of this test run alone; its volumes go at the end."""
    yield PROJECT
    check("docker/down", "--volumes", timeout_s=120, PROJECT=PROJECT)


@pytest.fixture(scope="session", params=STARTED)
def stack(request: pytest.FixtureRequest, project: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`make up-colocated STEPS=2 DETACH=1` under one profile. Takes a minute or two; images must be built."""
    profile: str = request.param
    out, port = tmp_path_factory.mktemp(profile), free_port()
    variables = {"SECCOMP": profile, "PROJECT": project, "PORT": str(port)}
    output = check(
        "make",
        "up-colocated",
        timeout_s=UP_DEADLINE_S,
        STEPS="2",
        DETACH="1",
        OUT=str(out),
        ENGINE_TIMEOUT="600",
        **variables,
    )
    try:
        sibling = f"{project}-sibling"
        compose = f". docker/lib.sh; compose run --detach --no-deps --name {sibling} trainer sleep 600"
        check("bash", "-c", compose, **variables)
        engine = check("bash", "-c", ". docker/lib.sh; compose ps --quiet engine", **variables).strip()
        yield Stack(
            profile=profile,
            port=port,
            out=out,
            output=output,
            engine=engine,
            trainer=f"{project}-trainer",
            sibling=sibling,
        )
    finally:
        check("make", "down", timeout_s=120, **variables)
