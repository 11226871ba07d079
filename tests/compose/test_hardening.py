"""What the containers may do: asked inside them, of every process."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
import testinfra
from testinfra.host import Host

from syncstack.seccomp.expected import expected
from tests.compose.stack import Stack, check, facts, inspect, run

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
    """The status of every process of a container.

    A health check is a process that the runtime starts in it, and for some milliseconds that is still the runtime's
    own, on its way to what it was told to be: then they are all looked at again.
    """
    deadline = time.monotonic() + 30
    while True:
        lines = check("docker", "exec", container, "python", "-c", STATUS).splitlines()
        found: list[dict[str, list[str]]] = [json.loads(line) for line in lines]
        if not any(process["Name"][0].startswith("runc:[") for process in found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


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
    if stack.layout == "disagg":
        assert host.check_output("find /run/syncstack -mindepth 1") == "", "there is no shared folder"
        return
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


def test_apart_they_share_one_network_and_nothing_else(stack: Stack) -> None:
    containers = {"trainer": inspect(stack.trainer), **{name: inspect(each) for name, each in stack.engines.items()}}
    networks = {name: set(each["NetworkSettings"]["Networks"]) for name, each in containers.items()}
    volumes = {name: {m["Name"] for m in each["Mounts"] if m["Type"] == "volume"} for name, each in containers.items()}
    for name in stack.engines:
        if stack.layout == "colocated":
            assert volumes["trainer"] & volumes[name]
            continue
        (link,) = networks["trainer"]
        assert networks["trainer"] & networks[name] == {link}
        assert inspect(link, "network")["Internal"] is True
        assert volumes["trainer"] & volumes[name] == set()
        binds = [mount for mount in containers[name]["Mounts"] if mount["Type"] == "bind"]
        assert [(mount["Destination"], mount["RW"]) for mount in binds] == [("/run/secrets/token", False)]


def test_apart_an_engine_listens_to_its_trainer_on_the_link_only(stack: Stack) -> None:
    """/proc/net/tcp, because nothing in the image could say it: local address, then state 0A for listening."""
    if stack.layout == "colocated":
        listening = listeners(stack.engine)
        assert {port for _, port in listening if port in (7000, 7001)} == set()
        return
    for name, container in stack.engines.items():
        networks = inspect(container)["NetworkSettings"]["Networks"]
        (link,) = [each["IPAddress"] for network, each in networks.items() if network.endswith("_link")]
        assert {(host, port) for host, port in listeners(container) if port in (7000, 7001)} == {
            (link, 7000),
            (link, 7001),
        }, name


def listeners(container: str) -> set[tuple[str, int]]:
    """IPv4 addresses and ports that a container's processes listen on."""
    lines = [line.split() for line in check("docker", "exec", container, "cat", "/proc/net/tcp").splitlines()[1:]]
    local = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in local}


def test_apart_who_has_no_token_is_turned_away(stack: Stack) -> None:
    def probe(address: str, **variables: str) -> tuple[int, str]:
        options = [f"--env={name}={value}" for name, value in variables.items()]
        result = run("docker", "exec", *options, stack.sibling, "syncstack", "probe", "--peer", address)
        return result.returncode, result.stdout

    if stack.layout == "colocated":
        code, said = probe("unix:/run/syncstack/engine-0")
        assert code == 0, said  # the kernel says who asks
        return
    address = "tcp://engine-0.link:7000"
    code, said = probe(address)
    assert code == 0, said
    for token in ("", "0" * 64):
        code, said = probe(address, SYNCSTACK_TOKEN_FILE="", SYNCSTACK_TOKEN=token)
        assert code != 0
        assert "token" in said
    script = "import httpx; print(httpx.get('http://engine-0.link:7000/hello').status_code)"
    assert check("docker", "exec", stack.sibling, "python", "-c", script).strip() == "401"


def test_system_calls_answer_as_the_table_says(stack: Stack, container: str) -> None:
    engine = check("docker", "version", "--format", "{{.Server.Version}}").strip()
    collected = facts(container)["syscalls"]
    answers = {name: fact["verdict"] for name, fact in collected.items()}
    assert answers == dict(expected(stack.profile, engine=engine)), collected
