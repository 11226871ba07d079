"""Trainer and engine that share no folder: whole refits over TCP, with descriptors by pidfd, and what must not work."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from syncstack import EngineClient, Settings
from syncstack.engines.vllm.launch import launch
from syncstack.errors import EngineUnreachable, LinkRefused, SettingsError
from syncstack.plan import Choice
from syncstack.refit.state import Step
from syncstack.wire import tcp, unix
from syncstack.wire.tcp import Address
from tests.ports import free_port
from tests.process.conftest import Engine
from tests.process.test_bad_input import assert_refused, cli
from tests.process.test_pidfd import NOBODY, filter_file, needs
from tests.process.test_refit import SLOW_S, StartEngine, StartTrainer, close_to, read_line

TOKEN = "a token of at least sixteen bytes"
HOST_FD = {"SYNCSTACK_TRANSPORT": "host_fd"}
LOOPBACKS = ("127.0.0.1", "[::1]")


class Pod:
    """Two containers as far as the kernel cares: mount namespaces of their own, a private tmpfs each where the socket
    folder is, one PID namespace. Nothing in ``folder`` is hidden from any user."""

    def __init__(self, folder: Path, socket_dir: Path, owner: int) -> None:
        self.folder = folder
        self.private = str(socket_dir)
        """For processes of the tests' own user; ``wrap`` is for others."""
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN + "\n")
        self.token_file.chmod(0o600)
        os.chown(self.token_file, owner, owner)
        mount = f'mount -t tmpfs -o mode=0700,uid={owner},gid={owner} tmpfs "$0" && exec "$@"'
        self.wrap = ["unshare", "--mount", "--propagation=private", "sh", "-c", mount, str(socket_dir)]

    def env(self, **more: str) -> dict[str, str]:
        """What both sides are started with."""
        return {"SYNCSTACK_TOKEN_FILE": str(self.token_file), "HOME": str(self.folder), **more}

    def listening(self, host: str = "127.0.0.1", also: str = "") -> dict[str, str]:
        """What the engine is started with besides."""
        return self.env(SYNCSTACK_LISTEN=f"{also}tcp://{host}:0")


@pytest.fixture
def make_pod(socket_dir: Path) -> Iterator[Callable[..., Pod]]:
    folder = Path(tempfile.mkdtemp(prefix="pod-", dir="/tmp"))
    folder.chmod(0o755)

    def make(owner: int = 0) -> Pod:
        pod = Pod(folder, socket_dir, owner)
        needs([*pod.wrap])
        return pod

    yield make
    shutil.rmtree(folder)


def address_of(engine: Engine) -> str:
    (address,) = re.findall(r"control endpoint at (tcp://\S+)", engine.log())
    return str(address)


def client_settings(pod: Pod, **changes: object) -> Settings:
    return Settings.load(**{"token_file": pod.token_file, "engine_ready_s": 20, **changes})


def assert_refits(
    trainer: subprocess.Popen[str], engine: Engine, versions: tuple[int, ...], transport: str = "host_fd"
) -> dict[str, str]:
    """Returns why no better transport was taken."""
    for version in versions:
        report = read_line(trainer)
        assert (report["version"], report["transport"]) == (version, transport)
        assert report["digests_equal"] == report["tensors"] == 20
    assert trainer.wait(timeout=30) == 0
    assert engine.complete().headers["x-syncstack-version"] == str(versions[-1])
    assert close_to(engine.logprobs(), report["logprobs"])
    why_not: dict[str, str] = report["why_not"]
    return why_not


def namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


@pytest.mark.parametrize("host", LOOPBACKS)
def test_refits_without_a_common_folder(
    start_engine: StartEngine, start_trainer: StartTrainer, make_pod: Callable[..., Pod], model: Path, host: str
) -> None:
    pod = make_pod()
    engine = start_engine(env=pod.listening(host, also="unix,"), private=pod.private)
    address = address_of(engine)
    assert f"://{host}:" in address
    trainer = start_trainer(model, "3", address=address, env=pod.env(), private=pod.private)
    read_line(trainer)
    pids = (engine.process.pid, trainer.pid, os.getpid())
    assert (len({namespace(pid, "pid") for pid in pids}), len({namespace(pid, "mnt") for pid in pids})) == (1, 3)
    assert_refits(trainer, engine, (1, 2, 3))
    with pytest.raises(EngineUnreachable):  # the engine listens there too, for others than us
        unix.connect(Path(engine.address.removeprefix("unix:")) / "control.sock", deadline=time.monotonic())
    assert TOKEN not in engine.log()


def test_it_works_under_permissive_as_nobody_without_a_capability(
    start_engine: StartEngine, start_trainer: StartTrainer, make_pod: Callable[..., Pod], model: Path, socket_dir: Path
) -> None:
    """Each under its own filter, no capability in any set, no new privileges; nothing of the trainer's is writable."""
    needs(NOBODY)
    pod = make_pod(65534)
    copy = shutil.copytree(model, pod.folder / "model")
    for path in (copy, *copy.iterdir()):
        path.chmod(0o755)
    filtered = [sys.executable, "-m", "syncstack.cli", "seccomp", "run", "permissive", "--", *NOBODY]
    engine = start_engine(model=copy, env=pod.listening(), wrap=[*pod.wrap, *filtered])
    trainer = start_trainer(copy, "2", address=address_of(engine), env=pod.env(), wrap=[*pod.wrap, *filtered])
    for pid in (engine.process.pid, trainer.pid):
        status = await_status(pid, "Uid:\t65534", f"CapEff:\t{'0' * 16}")
        assert re.findall(r"Cap(?:Inh|Prm|Eff|Bnd|Amb):\t(\w+)", status) == ["0" * 16] * 5
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
    read_line(trainer)
    assert_refits(trainer, engine, (1, 2))


def await_status(pid: int, *lines: str) -> str:
    """The process's status once it shows all `lines`: setpriv changes the user first and the capabilities after it."""
    deadline = time.monotonic() + 20
    while not all(line in (status := Path(f"/proc/{pid}/status").read_text()) for line in lines):
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


@pytest.mark.parametrize("denied", ["restrictive", "pidfd_getfd"])
def test_a_denied_call_is_named_and_the_bytes_go_over_the_link(
    start_engine: StartEngine, start_trainer: StartTrainer, make_pod: Callable[..., Pod], model: Path, tmp_path: Path,
    denied: str,
) -> None:  # fmt: skip
    pod = make_pod()
    profile = denied if denied == "restrictive" else filter_file(tmp_path, 1, denied)
    engine = start_engine(env=pod.listening(), private=pod.private, profile=profile)
    before = engine.logprobs()
    where = {"address": address_of(engine), "private": pod.private}
    trainer = start_trainer(model, "1", env=pod.env(**HOST_FD), **where)
    read_line(trainer)
    failure = read_line(trainer)
    assert failure["error"] == "PlanError"
    assert "By a unix socket: they share no folder" in failure["text"]
    assert "By pidfd_getfd: the engine may not call pidfd_getfd (pidfd_getfd" in failure["text"]
    assert failure["seconds"] < 2.0
    assert engine.logprobs() == before
    trainer = start_trainer(model, "2", env=pod.env(), **where)
    read_line(trainer)
    assert "the engine may not call pidfd_getfd" in assert_refits(trainer, engine, (1, 2), "stream")["host_fd"]


def test_a_trainer_in_another_pid_namespace_sends_its_bytes_over_the_link(
    start_engine: StartEngine, start_trainer: StartTrainer, make_pod: Callable[..., Pod], model: Path
) -> None:
    """No folder and no PID namespace in common: nothing but the link is left."""
    pod = make_pod()
    engine = start_engine(env=pod.listening(), private=pod.private)
    apart = [*pod.wrap, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--"]
    trainer = start_trainer(model, "2", address=address_of(engine), env=pod.env(), wrap=apart)
    read_line(trainer)
    why_not = assert_refits(trainer, engine, (1, 2), "stream")["host_fd"]
    assert "they are in different PID namespaces" in why_not
    assert "shareProcessNamespace" in why_not


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_stream_can_be_asked_for_where_a_descriptor_could_go(
    start_engine: StartEngine, start_trainer: StartTrainer, make_pod: Callable[..., Pod], model: Path, way: str
) -> None:
    """Both under restrictive, over either kind of link."""
    pod = make_pod()
    engine = start_engine(env=pod.listening(also="unix,"), profile="restrictive")
    trainer = start_trainer(
        model,
        "3",
        address=address_of(engine) if way == "tcp" else engine.address,
        env=pod.env(SYNCSTACK_TRANSPORT="stream"),
        profile="restrictive",
    )
    read_line(trainer)
    assert assert_refits(trainer, engine, (1, 2, 3), "stream") == {}


@pytest.fixture
def engine_and_pod(start_engine: StartEngine, make_pod: Callable[..., Pod]) -> tuple[Engine, Pod]:
    pod = make_pod()
    return start_engine(slow_s=SLOW_S, env=pod.listening(), private=pod.private), pod


def test_the_wrong_token_no_token_and_a_strangers_bytes_get_nowhere(engine_and_pod: tuple[Engine, Pod]) -> None:
    engine, pod = engine_and_pod
    address = address_of(engine)
    other = client_settings(pod, token_file=None, token="another token of the right length")
    with pytest.raises(LinkRefused, match=r"not shown the token.*observed: another one"):
        EngineClient.connect(address, settings=other)
    with pytest.raises(SettingsError, match="needs a token"):
        EngineClient.connect(address, settings=Settings.load())
    with closing(EngineClient.connect(address, settings=client_settings(pod))) as client:
        port = client.info.workers[0].port
        assert client.info.workers[0].socket == ""  # without a folder, none
        for at in (port, int(address.rpartition(":")[2])):
            with tcp.connect(Address("127.0.0.1", at), deadline=time.monotonic() + 5) as sock:
                sock.settimeout(15)
                sock.sendall(os.urandom(4096) + b"\r\n\r\n")
                with pytest.raises(ConnectionResetError):
                    while sock.recv(4096):
                        pass
                    raise ConnectionResetError
        assert client.state().step is Step.SERVING
        (link,) = client.open_links(0, [Choice(transport="host_fd", fd="pidfd")])
        assert link.proven == ("worker", 0)
        link.close()


@pytest.mark.parametrize("victim", ["trainer", "engine"])
def test_a_death_in_the_middle_of_a_load_is_known_over_tcp_too(
    engine_and_pod: tuple[Engine, Pod], start_trainer: StartTrainer, model: Path, victim: str
) -> None:
    engine, pod = engine_and_pod
    trainer = start_trainer(model, "1", address=address_of(engine), env=pod.env(), private=pod.private)
    read_line(trainer)
    with closing(EngineClient.connect(address_of(engine), settings=client_settings(pod))) as client:
        await_step(client, Step.LOADING)
        if victim == "trainer":
            os.killpg(trainer.pid, signal.SIGKILL)
            await_step(client, Step.DIRTY)
            assert "its trainer went away" in client.state().reason
            return
        begin = time.monotonic()
        engine.kill()
        failure = read_line(trainer)
        assert time.monotonic() - begin < 5.0
        assert (failure["error"], failure["phase"]) == ("RefitFailed", "load")


def test_an_engine_that_is_told_to_end_closes_both_doors(
    start_engine: StartEngine, make_pod: Callable[..., Pod]
) -> None:
    pod = make_pod()
    engine = start_engine(env=pod.listening(also="unix,"))
    folder = Path(engine.address.removeprefix("unix:"))
    address = Address.parse(address_of(engine))
    assert sorted(path.name for path in folder.iterdir()) == ["control.sock", "worker-0.sock"]
    engine.kill(signal.SIGTERM)
    engine.process.wait(timeout=10)
    assert list(folder.iterdir()) == []
    with tcp.listen(address):
        pass


def await_step(client: EngineClient, step: Step) -> None:
    deadline = time.monotonic() + 15
    while client.state().step is not step:
        assert time.monotonic() < deadline, client.state()
        time.sleep(0.05)


# --- starting


KINDS = pytest.mark.parametrize("kind", ["vllm", "reference"])


@KINDS
def test_without_a_token_an_engine_does_not_listen_on_tcp(socket_dir: Path, model: Path, kind: str) -> None:
    result = cli(socket_dir, "engine", kind, "--model", str(model), "--listen", "tcp://127.0.0.1:0")
    assert_refused(result, "listening on tcp://127.0.0.1:0 needs a token", "openssl rand -hex 32")


@KINDS
def test_a_place_that_cannot_be_listened_on_is_refused(socket_dir: Path, model: Path, kind: str) -> None:
    result = cli(socket_dir, "engine", kind, "--model", str(model), "--listen", "tcp://fd00::1:7000")
    assert_refused(result, "tcp://[2001:db8::7]:7000", "Next: ")


@KINDS
def test_c06_a_taken_port_is_refused_before_the_model_is_loaded(
    socket_dir: Path, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCSTACK_TOKEN", TOKEN)
    with tcp.listen(Address("127.0.0.1", 0)) as listener:
        address = str(tcp.address_of(listener))
        result = cli(socket_dir, "engine", kind, "--model", str(model), "--listen", address)
    assert_refused(
        result,
        f"{address} cannot be listened on (observed: Address already in use by process {os.getpid()} (",
        "--listen",
    )


def test_a_token_file_that_others_may_read_is_refused(
    socket_dir: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o644)
    monkeypatch.setenv("SYNCSTACK_TOKEN_FILE", str(tmp_path / "token"))
    result = cli(socket_dir, "engine", "reference", "--model", str(model), "--listen", "tcp://127.0.0.1:0")
    assert_refused(result, "mode 0644", "SYNCSTACK_TOKEN_FILE")
    assert TOKEN not in result.stderr


def test_a_workers_port_follows_that_of_the_control_endpoint(
    start_engine: StartEngine, make_pod: Callable[..., Pod]
) -> None:
    pod = make_pod()
    with tcp.listen(Address("127.0.0.1", 0)) as listener:
        address = tcp.address_of(listener)
    engine = start_engine(env=pod.env(SYNCSTACK_LISTEN=str(address)), private=pod.private)
    with closing(EngineClient.connect(str(address), settings=client_settings(pod))) as client:
        assert client.info.workers[0].port == address.port + 1
    assert address_of(engine) == str(address)


BESIDE = """
import json, time
from syncstack.facts import route_to
from syncstack.wire import tcp
from syncstack.wire.link import Link
from syncstack.wire.tcp import Address
with tcp.listen(Address("10.9.0.1", 0)) as listener:
    with Link(tcp.connect(tcp.address_of(listener), deadline=time.monotonic() + 5)) as ours:
        with Link(listener.accept()[0]) as theirs:
            hosts = [ours.local_host, theirs.local_host]
route = route_to("10.9.0.7")
print(json.dumps([hosts, route.interface, route.source]))
"""


def test_c16_a_group_meets_where_its_links_run_and_not_on_dockers_bridge() -> None:
    """A namespace with a loopback, a docker0 that comes first, and the interface that leads to the peer."""
    network = (
        "ip link set lo up && ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0"
        " && ip link set docker0 up && ip link add eth9 type bridge && ip addr add 10.9.0.1/24 dev eth9"
        " && ip link set eth9 up"
    )
    needs(["unshare", "--net", "sh", "-c", network + ' && exec "$0"'])
    argv = ["unshare", "--net", "sh", "-c", network + ' && exec "$@"', "sh", sys.executable, "-c", BESIDE]
    found = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    assert json.loads(found) == [["10.9.0.1", "10.9.0.1"], "eth9", "10.9.0.1"]


APART = """
import ctypes, json, os, subprocess, time
from syncstack.wire import tcp
from syncstack.wire.link import Link
from syncstack.wire.tcp import Address
def ip(*arguments): subprocess.run(["ip", *arguments], check=True)
apart, port = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    assert ctypes.CDLL(None).unshare(0x40000000) == 0  # CLONE_NEWNET
    os.write(apart[1], b".")
    number = int(os.read(port[0], 16))
    ip("addr", "add", "10.9.1.2/30", "dev", "veth1")
    ip("link", "set", "veth1", "up")
    with Link(tcp.connect(Address("10.9.1.1", number), deadline=time.monotonic() + 10)) as link:
        os.write(1, json.dumps(link.local_host).encode() + b"\\n")  # one write: both sides write to one pipe
    os._exit(0)
os.read(apart[0], 1)
ip("link", "set", "lo", "up")
ip("link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "netns", str(child))
ip("addr", "add", "10.9.1.1/30", "dev", "veth0")
ip("link", "set", "veth0", "up")
with tcp.listen(Address("0.0.0.0", 0)) as listener:
    os.write(port[1], str(tcp.address_of(listener).port).encode())
    with Link(listener.accept()[0]) as link:
        os.write(1, json.dumps(link.local_host).encode() + b"\\n")
assert os.waitpid(child, 0)[1] == 0
"""


def test_c11_what_listens_everywhere_is_met_where_its_peer_came_to() -> None:
    """Two network namespaces. No side says where it is reached: data links go to the host that was dialled, and the
    members of a group meet at the addresses that their links have, so neither 0.0.0.0 nor 127.0.0.1 is ever told."""
    argv = ["unshare", "--net", sys.executable, "-c", APART]
    found = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    assert sorted(json.loads(line) for line in found.splitlines()) == ["10.9.1.1", "10.9.1.2"]


def test_vllms_server_inherits_the_socket_that_was_opened_for_it(
    socket_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, str] = {}
    monkeypatch.setattr(os, "execve", lambda _path, _argv, env: started.update(env))
    settings = Settings.load(listen="tcp://127.0.0.1:0", token=TOKEN, socket_dir=socket_dir)
    launch(model=model, host="127.0.0.1", port=free_port(), dtype="float32", extra=[], settings=settings)
    assert started["SYNCSTACK_LISTEN"] == "tcp://127.0.0.1:0"
    fd = int(started["SYNCSTACK_LISTEN_FD"])
    assert os.get_inheritable(fd)
    with tcp.adopt(fd, Address("127.0.0.1", 0)) as listener:
        assert not os.get_inheritable(fd)
        tcp.connect(tcp.address_of(listener), deadline=time.monotonic() + 5).close()
