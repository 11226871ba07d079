"""The compose files, as `docker compose config` resolves them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.compose.stack import PROFILES, check

SERVICES = {"model", "engine", "trainer"}


def resolved(*files: str, **variables: str) -> dict[str, Any]:
    """The resolved project. ``files`` are added to compose.yaml."""
    arguments = [argument for file in ("compose.yaml", *files) for argument in ("--file", file)]
    output = check("docker", "compose", *arguments, "--profile", "colocated", "config", "--format", "json", **variables)
    project: dict[str, Any] = json.loads(output)
    return project


def by_profile(profile: str) -> dict[str, Any]:
    """The resolved project under a profile, with the override that docker/lib.sh takes for it."""
    builtin = profile in ("docker-default", "unconfined")
    return resolved(*([f"docker/compose.{profile}.yaml"] if builtin else []), SECCOMP=profile)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_service_is_hardened(profile: str) -> None:
    project = by_profile(profile)
    filters = {"docker-default": [], "unconfined": ["seccomp=unconfined"]}
    expected = ["no-new-privileges:true", *filters.get(profile, [f"seccomp=./seccomp/{profile}.json"])]
    assert set(project["services"]) == SERVICES
    for name, service in project["services"].items():
        assert service["security_opt"] == expected, name
        assert (service["user"], service["cap_drop"], service["read_only"]) == ("10001:10001", ["ALL"], True), name
        assert service["ipc"] == "private", name
        assert not {"privileged", "pid", "cap_add", "devices", "userns_mode"} & set(service), name
        assert service.get("network_mode") in (None, "none"), name


def test_the_agreement_test_hardens_its_containers_alike() -> None:
    file = "tests/compose/agreement.yaml"
    command = ("docker", "compose", "--file", file, "--profile", "prepare", "config", "--format", "json")
    cells = json.loads(check(*command, SECURITY="seccomp=./seccomp/restrictive.json"))["services"]
    stack = resolved()["services"]["trainer"]
    for name, service in cells.items():
        for option in ("user", "cap_drop", "security_opt", "read_only", "tmpfs", "ipc", "init"):
            assert service[option] == stack[option], (name, option)
        assert not {"privileged", "cap_add", "devices", "userns_mode"} & set(service), name
    assert [name for name, service in cells.items() if "pid" in service] == ["trainer-pid"]


def test_the_default_profile_is_restrictive() -> None:
    options = {service["security_opt"][1] for service in resolved(SECCOMP="")["services"].values()}
    assert options == {"seccomp=./seccomp/restrictive.json"}


def test_the_engine_answers_on_loopback_only() -> None:
    ports = [port for service in resolved(PORT="8123")["services"].values() for port in service.get("ports", [])]
    assert [(port["host_ip"], port["published"]) for port in ports] == [("127.0.0.1", "8123")]


def test_gpu_file_adds_one_device_and_keeps_the_hardening() -> None:
    project = resolved("compose.gpu.yaml", GPU="3", GPU_BASE_IMAGE="example/cuda:1")
    plain = resolved()
    for name in ("engine", "trainer"):
        service = project["services"][name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["device_ids"], device["capabilities"]) == (["3"], ["gpu"])
        assert service["build"]["args"]["BASE_IMAGE"] == "example/cuda:1"
        for option in ("security_opt", "cap_drop", "read_only", "user", "ipc"):
            assert service[option] == plain["services"][name][option]


def test_a_model_folder_is_mounted_read_only() -> None:
    project = resolved("docker/compose.model.yaml", MODEL="/somewhere/model", MODEL_PATH="/model")
    for name, service in project["services"].items():
        mounts = [volume for volume in service["volumes"] if volume["type"] == "bind"]
        assert [(mount["source"], mount["target"], mount["read_only"]) for mount in mounts] == [
            ("/somewhere/model", "/model", True)
        ], name
        assert "/model" in service["command"]
