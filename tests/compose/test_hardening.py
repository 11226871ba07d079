"""What the containers may do: asked inside them, of every process."""

from __future__ import annotations

import json
from typing import Any

import pytest
import testinfra
from testinfra.host import Host

from syncstack.seccomp.expected import expected
from tests.compose.stack import Stack, check, facts, inspect

CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
# Of HostConfig: all that could widen what a container may do.
SETTINGS = [
    "CapAdd",
    "CapDrop",
    "SecurityOpt",
    "ReadonlyRootfs",
    "Privileged",
    "PidMode",
    "IpcMode",
    "UsernsMode",
    "Devices",
]
# One JSON object per process: the fields of /proc/PID/status that say what it may do.
STATUS = """
import json, pathlib
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    print(json.dumps({name: fields[name].split() for name in
          ("Name", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")}))
"""


@pytest.fixture(params=["engine", "sibling"], ids=["engine", "trainer"])
def container(request: pytest.FixtureRequest, stack: Stack) -> str:
    """A running container of each service."""
    name: str = getattr(stack, request.param)
    return name


@pytest.fixture
def host(container: str) -> Host:
    return testinfra.get_host(f"docker://{container}")


def processes(container: str) -> list[dict[str, list[str]]]:
    """The status of every process of a container."""
    return [json.loads(line) for line in check("docker", "exec", container, "python", "-c", STATUS).splitlines()]


def test_every_process_is_unprivileged(stack: Stack, container: str) -> None:
    found = processes(container)
    mode = {"unconfined": "0"}.get(stack.profile, "2")
    for process in found:
        assert process["Uid"] == ["10001"] * 4, process
        assert process["Gid"] == ["10001"] * 4, process
        assert set(process["Groups"]) <= {"10001"}, process
        assert {int(process[name][0], 16) for name in CAPABILITIES} == {0}, process
        assert process["NoNewPrivs"] == ["1"], process
        assert process["Seccomp"] == [mode], process
    if container == stack.engine:
        assert any("Worker" in " ".join(process["Name"]) for process in found), "vLLM's worker was not looked at"


def test_root_is_read_only(host: Host) -> None:
    assert host.run("touch /opt/syncstack/x /opt/venv/x /usr/x /x").rc != 0
    mounts = [line.split() for line in host.check_output("cat /proc/mounts").splitlines()]
    options = {mount[1]: mount[3].split(",") for mount in mounts}
    assert "ro" in options["/"]
    assert {"nosuid", "nodev", "noexec"} <= set(options["/tmp"])


def test_sockets_are_private_to_the_user(stack: Stack, host: Host) -> None:
    folder = host.file("/run/syncstack/engine-0")
    assert (folder.is_directory, folder.mode, folder.uid) == (True, 0o700, 10001)
    assert host.file("/run/syncstack/engine-0/control.sock").mode == 0o600
    assert host.check_output("find /run/syncstack -type f") == "", "weights or anything else as a file"


def test_no_namespace_is_shared(stack: Stack) -> None:
    engine, trainer = (facts(name)["namespaces"] for name in (stack.engine, stack.sibling))
    for kind in ("pid", "ipc", "net", "mnt", "uts"):
        assert engine[kind] != trainer[kind], kind


def test_the_container_that_trained_had_the_same_settings(stack: Stack) -> None:
    def settings(name: str) -> dict[str, Any]:
        host, config = inspect(name)["HostConfig"], inspect(name)["Config"]
        return {option: host[option] for option in SETTINGS} | {"User": config["User"]}

    assert settings(stack.trainer) == settings(stack.sibling) == settings(stack.engine)
    assert settings(stack.trainer)["Privileged"] is False
    assert settings(stack.trainer)["CapAdd"] is None
    modes = {inspect(name)["HostConfig"]["NetworkMode"] for name in (stack.trainer, stack.engine)}
    assert not modes & {"host", "none"}
    assert not any(mode.startswith("container:") for mode in modes)


def test_system_calls_answer_as_the_table_says(stack: Stack, container: str) -> None:
    engine = check("docker", "version", "--format", "{{.Server.Version}}").strip()
    collected = facts(container)["syscalls"]
    answers = {name: fact["verdict"] for name, fact in collected.items()}
    assert answers == dict(expected(stack.profile, engine=engine)), collected
