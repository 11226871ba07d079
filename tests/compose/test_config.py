"""The compose files, as `docker compose config` resolves them."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.compose.stack import PROFILES, check

SERVICES = {
    "colocated": {"model", "engine", "trainer"},
    "disagg": {"model", "engine-model", "head", "engine-0", "engine-1", "trainer-disagg"},
    "disagg-more": {f"engine-{number}" for number in range(2, 8)},
}


def resolved(*files: str, layouts: tuple[str, ...] = ("colocated",), **variables: str) -> dict[str, Any]:
    """The resolved project. ``files`` are added to compose.yaml."""
    arguments = [argument for file in ("compose.yaml", *files) for argument in ("--file", file)]
    arguments += [argument for layout in layouts for argument in ("--profile", layout)]
    output = check("docker", "compose", *arguments, "config", "--format", "json", **variables)
    project: dict[str, Any] = json.loads(output)
    return project


def by_profile(profile: str) -> dict[str, Any]:
    """The resolved project under a profile, with the override that docker/lib.sh takes for it."""
    builtin = profile in ("docker-default", "unconfined")
    return resolved(*([f"docker/compose.{profile}.yaml"] if builtin else []), layouts=(*SERVICES,), SECCOMP=profile)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_service_is_hardened(profile: str) -> None:
    project = by_profile(profile)
    filters = {"docker-default": [], "unconfined": ["seccomp=unconfined"]}
    expected = ["no-new-privileges:true", *filters.get(profile, [f"seccomp=./seccomp/{profile}.json"])]
    assert set(project["services"]) == set().union(*SERVICES.values())
    for name, service in project["services"].items():
        assert service["security_opt"] == expected, name
        assert (service["user"], service["cap_drop"], service["read_only"]) == ("10001:10001", ["ALL"], True), name
        assert service["ipc"] == "private", name
        assert not {"privileged", "pid", "cap_add", "devices", "userns_mode"} & set(service), name
        assert service.get("network_mode") in (None, "none"), name


def test_f08_shared_memory_is_the_services_and_not_its_builds() -> None:
    """docker/compose#6333: under `build` it is for the build, and the container has Docker's 64 MiB."""
    services = resolved(layouts=(*SERVICES,))["services"]
    engines = {name for name, service in services.items() if "engine-vllm" in service["image"]}
    assert {name: int(services[name]["shm_size"]) for name in engines} == dict.fromkeys(engines, 512 << 20)
    assert not [name for name, service in services.items() if "shm_size" in service.get("build", {})]


def test_f08_the_running_engine_has_it(project: str) -> None:
    """Of the container itself, which is what counts."""
    argv = ("docker", "compose", "--profile", "colocated", "run", "--rm", "--no-deps", "--no-TTY", "engine")
    size = check(
        *argv, "df", "--output=size", "--block-size=1M", "/dev/shm", PROJECT=project, COMPOSE_PROJECT_NAME=project
    )
    assert size.split()[-1] == "512"


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


@pytest.mark.parametrize("layout", ["colocated", "disagg"])
def test_a_layout_starts_its_services(layout: str) -> None:
    assert set(resolved(layouts=(layout,))["services"]) == SERVICES[layout]


def test_engines_apart_differ_in_name_and_address_only() -> None:
    services = resolved(layouts=("disagg", "disagg-more"))["services"]
    engines = {name: services[name] for name in sorted(services) if name.startswith("engine-") and name[-1].isdigit()}
    assert list(engines) == [f"engine-{number}" for number in range(8)]
    for name, engine in engines.items():
        environment = engine["environment"]
        assert environment.pop("SYNCSTACK_ENGINE_NAME") == name
        assert environment.pop("SYNCSTACK_LISTEN") == f"tcp://{name}.link:7000"
        assert environment.pop("SYNCSTACK_ENGINE_URL") == f"http://{name}.link:8000"
        assert engine.pop("networks") == {"engines": {}, "link": {"aliases": [f"{name}.link"]}}
        engine.pop("profiles", None)
        assert engine == engines["engine-0"], name


def test_an_engine_runs_the_same_in_both_layouts() -> None:
    services = resolved(layouts=("colocated", "disagg"))["services"]
    told = services["trainer-disagg"]["environment"]["SYNCSTACK_ENGINE_COMMAND"]
    assert shlex.split(told) == services["engine"]["command"]


def test_the_default_profile_is_restrictive() -> None:
    options = {
        service["security_opt"][1] for service in resolved(SECCOMP="", layouts=(*SERVICES,))["services"].values()
    }
    assert options == {"seccomp=./seccomp/restrictive.json"}


def test_the_engine_answers_on_loopback_only() -> None:
    services = resolved(PORT="8123", layouts=(*SERVICES,))["services"]
    ports = {name: port for name, service in services.items() for port in service.get("ports", [])}
    assert {port["host_ip"] for port in ports.values()} == {"127.0.0.1"}
    assert {name: port.get("published") for name, port in ports.items()} == {
        "engine": "8123",
        **{f"engine-{number}": None for number in range(8)},  # any that is free
    }


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
    variables = {"MODEL": "/somewhere/model", "MODEL_PATH": "/model"}
    project = resolved("docker/compose.model.yaml", layouts=(*SERVICES,), **variables)
    del project["services"]["head"]  # holds no model
    for name, service in project["services"].items():
        mounts = [volume for volume in service["volumes"] if volume["type"] == "bind"]
        assert [(mount["source"], mount["target"], mount["read_only"]) for mount in mounts] == [
            ("/somewhere/model", "/model", True)
        ], name
        if not name.startswith("engine-"):  # those are told what to run
            assert "/model" in service["command"], name
    assert "/model" in project["services"]["trainer-disagg"]["environment"]["SYNCSTACK_ENGINE_COMMAND"]
