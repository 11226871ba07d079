"""What is in the images, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compose.stack import check, inspect

IMAGES = ("trainer", "engine-vllm")
BOTH = pytest.mark.parametrize("image", [f"syncstack/{name}:dev" for name in IMAGES], ids=IMAGES)


def inside(image: str, script: str) -> str:
    """What a shell script prints in a container of the image, as root so that nothing is hidden from it."""
    options = ("--rm", "--network=none", "--user=0", "--entrypoint=sh")
    return check("docker", "run", *options, image, "-c", script, timeout_s=120)


@BOTH
def test_user_and_labels(image: str) -> None:
    config = inspect(image, "image")["Config"]
    assert config["User"] == "10001:10001"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert {"org.opencontainers.image.version", "org.opencontainers.image.revision"} <= set(config["Labels"])
    assert inside(image, "getent passwd 10001").startswith("syncstack:")


@BOTH
def test_no_tools_to_build_or_fetch_with(image: str) -> None:
    tools = "cc gcc g++ c++ ld make pip pip3 uv git curl wget sudo"
    assert inside(image, f"for tool in {tools}; do command -v $tool || true; done") == ""
    assert inside(image, "find / -xdev -type d \\( -path '*/.cache/*' -o -path '/var/lib/apt/lists/*' \\) | head") == ""
    assert inside(image, "find /tmp /root -type f -size +8k | head") == ""


@BOTH
def test_no_setuid_file(image: str) -> None:
    assert inside(image, "find / -xdev -type f -perm /6000") == ""


@BOTH
def test_only_its_own_folders_are_writable(image: str) -> None:
    writable = "find / -xdev -not -path '/proc*' -not -type l \\( -user 10001 -o -perm -0002 -type d \\)"
    assert set(inside(image, writable).split()) <= {
        "/models", "/out", "/run/syncstack", "/tmp", "/var/tmp", "/run/lock", "/dev/shm", "/dev/mqueue",
    }  # fmt: skip


@BOTH
def test_bytecode_is_compiled(image: str) -> None:
    script = "cd /opt/venv/lib/python3*/site-packages; find syncstack torch/nn -name '*.py' -o -name '*.pyc'"
    found = [Path(line) for line in inside(image, script).split()]
    sources = {path.with_suffix("") for path in found if path.suffix == ".py"}
    compiled = {path.parent.parent / path.name.split(".")[0] for path in found if path.suffix == ".pyc"}
    assert sources
    assert sources <= compiled


def test_the_engine_has_a_healthcheck_and_no_cuda_packages() -> None:
    image = "syncstack/engine-vllm:dev"
    assert inspect(image, "image")["Config"]["Healthcheck"]["Test"] == ["CMD", "healthcheck"]
    names = inside(image, "ls /opt/venv/lib/python3*/site-packages").split()
    assert "vllm" in names
    assert not {"torchvision", "torchaudio", "torchcodec", "triton", "nvidia"} & set(names)


def test_the_unit_tests_pass_locked_down_as_the_stack_is() -> None:
    """On the images' own Python, as their user, under the restrictive profile, with a read-only root and no network."""
    compose = ". docker/lib.sh; export COMPOSE_PROFILES=test; compose"
    check("bash", "-c", f"{compose} build test", timeout_s=900)
    output = check("bash", "-c", f"{compose} run --rm test", timeout_s=300, SECCOMP="restrictive")
    assert " passed" in output.splitlines()[-1]
