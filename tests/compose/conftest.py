"""Fixtures of the container tests. Everything here is real: images, engine, model, training."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.compose.stack import LAYOUTS, ROOT, STARTED, Stack, check, run
from tests.ports import free_port

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


@pytest.fixture(scope="session", params=[(layout, profile) for layout in LAYOUTS for profile in STARTED], ids="-".join)
def stack(request: pytest.FixtureRequest, project: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`make up-LAYOUT STEPS=2 DETACH=1` under one profile. Takes a minute or two; images must be built."""
    layout, profile = request.param
    out = tmp_path_factory.mktemp(profile)
    variables = {"LAYOUT": layout, "SECCOMP": profile, "PROJECT": project, "PORT": str(free_port())}
    output = check(
        "make",
        f"up-{layout}",
        timeout_s=UP_DEADLINE_S,
        STEPS="2",
        DETACH="1",
        OUT=str(out),
        ENGINE_TIMEOUT="600",
        **variables,
    )
    services = {"engine-0": "engine"} if layout == "colocated" else {name: name for name in ("engine-0", "engine-1")}
    trainer = "trainer" if layout == "colocated" else "trainer-disagg"

    def compose(command: str) -> str:
        return check("bash", "-c", f". docker/lib.sh; compose {command}", **variables).strip()

    try:
        sibling = f"{project}-sibling"
        compose(f"run --detach --no-deps --name {sibling} {trainer} sleep 600")
        yield Stack(
            layout=layout,
            profile=profile,
            out=out,
            output=output,
            engines={name: compose(f"ps --quiet {service}") for name, service in services.items()},
            trainer=f"{project}-trainer",
            sibling=sibling,
        )
    finally:
        check("make", "down", timeout_s=120, **variables)
