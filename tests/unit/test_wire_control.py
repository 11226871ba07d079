"""The control endpoint's doors: the token over TCP, the kernel's word on the unix socket, and clients that are slow."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from syncstack.engines.host import start_control
from syncstack.errors import LinkRefused, SettingsError
from syncstack.facts import say_hello
from syncstack.refit import http as http_module
from syncstack.refit.client import EngineClient
from syncstack.refit.control import Control
from syncstack.refit.http import ControlServer
from syncstack.refit.messages import WorkerInfo
from syncstack.refit.state import EngineState
from syncstack.settings import PauseMode, Settings
from syncstack.wire import tcp, unix
from syncstack.wire.auth import Token
from syncstack.wire.tcp import Address

SECRET = "a secret of at least sixteen bytes"
T = TypeVar("T")


class NoEngine:
    """An engine with no tensors and no workers: enough for /hello and /state."""

    kind, kind_version, model, dtype, tensors = "reference", "1", "none", "float32", ()

    async def call_workers(self, op: str, session: str, expect: str, deadline_s: float) -> list[dict[str, Any]]:
        return []

    async def pause(self, mode: PauseMode) -> None: ...

    async def publish(self, version: int) -> None: ...

    async def resume(self) -> None: ...


@asynccontextmanager
async def served(sock: socket.socket, token: Token | None) -> AsyncIterator[ControlServer]:
    state = EngineState()
    state.started()
    control = Control(name="engine-0", host=NoEngine(), state=state, workers=(), heartbeat_s=0.1, stall_s=60.0)
    server = ControlServer(control, token)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        await task


def over_tcp(talk: Callable[[Address], T], *, token: str | None = SECRET) -> T:
    """Serve on a loopback port and ``talk`` to it in another thread."""

    async def run() -> T:
        sock = tcp.listen(Address("127.0.0.1", 0))
        async with served(sock, None if token is None else Token(token.encode())):
            return await asyncio.to_thread(talk, tcp.address_of(sock))

    return asyncio.run(run())


class OneWorker(NoEngine):
    """An engine whose one worker says who it is, and no more."""

    async def call_workers(self, op: str, session: str, expect: str, deadline_s: float) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(WorkerInfo(port=1, hello=say_hello("engine")))]


@pytest.mark.parametrize("door", ["unix", "tcp", "both"])
def test_an_engine_is_reachable_until_a_door_is_shut(tmp_path: Path, door: str) -> None:
    """Health needs no more than that: no name, no address, no token."""

    async def scenario() -> None:
        listen = {"unix": "unix", "tcp": "tcp://127.0.0.1:0", "both": "unix,tcp://127.0.0.1:0"}[door]
        state = EngineState()
        task = await start_control(OneWorker(), state, settings(listen=listen, socket_dir=tmp_path))
        await asyncio.sleep(0.2)
        assert state.reachable
        serving: list[Any] = [each for each in asyncio.all_tasks() if "Server.serve" in repr(each.get_coro())]
        assert len(serving) == len(listen.split(","))
        servers = [each.get_coro().cr_frame.f_locals["self"] for each in serving]
        servers[0].should_exit = True
        await asyncio.wait(serving[:1], timeout=5)
        await asyncio.sleep(0)
        assert not state.reachable
        for server in servers:
            server.should_exit = True
        await asyncio.wait_for(task, 5)

    asyncio.run(scenario())


def settings(**changes: object) -> Settings:
    return Settings.load(**{"token": SECRET, "engine_ready_s": 5, **changes})


def test_with_the_token_the_engine_says_who_it_is() -> None:
    def talk(address: Address) -> None:
        with closing(EngineClient.connect(str(address), settings=settings())) as client:
            assert (client.name, client.way) == ("engine-0", "tcp")
            assert client.state().version == 0
            lease = client.begin("session-1", 1, ())
            assert client.state().target == 1
            lease.close()

    over_tcp(talk)


def test_another_token_is_refused_at_once_and_named() -> None:
    def talk(address: Address) -> None:
        begin = time.monotonic()
        with pytest.raises(LinkRefused, match=r"not shown the token.*observed: another one.*SYNCSTACK_TOKEN_FILE"):
            EngineClient.connect(str(address), settings=settings(token="another secret of this length"))
        assert time.monotonic() - begin < 3.0

    over_tcp(talk)


def test_a_trainer_without_a_token_does_not_connect() -> None:
    with pytest.raises(SettingsError, match="connecting to tcp://127.0.0.1:7000 needs a token"):
        EngineClient.connect("tcp://127.0.0.1:7000", settings=Settings.load())


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer " + "0" * 64)],
        [("authorization", f"Bearer {SECRET}")],  # what is shown is derived from the token, and not the token
        [("authorization", Token(SECRET.encode()).authorization.replace("Bearer", "Basic"))],
        [("authorization", Token(SECRET.encode()).authorization + "0")],
        [("authorization", Token(SECRET.encode()).authorization)] * 2,
    ],
)
@pytest.mark.parametrize("path", ["/hello", "/begin", "/nowhere"])
def test_no_route_answers_without_the_right_header(headers: list[tuple[str, str]], path: str) -> None:
    def talk(address: Address) -> None:
        with httpx.Client(base_url=f"http://{address.netloc}", trust_env=False) as client:
            response = client.post(path, headers=headers, content=b"x" * 100_000)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"] == "LinkRefused"
        assert SECRET not in response.text

    over_tcp(talk)


def test_no_proxy_of_the_environment_sees_the_bearer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.2)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        over_tcp(lambda address: EngineClient.connect(str(address), settings=settings()).close())
        with pytest.raises(TimeoutError):
            proxy.accept()


def test_a_server_without_a_token_talks_to_nobody_over_tcp() -> None:
    def talk(address: Address) -> None:
        with tcp.connect(address, deadline=time.monotonic() + 5) as sock:
            sock.settimeout(10)
            sock.sendall(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n")
            assert drain(sock) == b""

    over_tcp(talk, token=None)


def drain(sock: socket.socket) -> bytes:
    """What comes until the other side closes, orderly or not."""
    said = b""
    try:
        while data := sock.recv(4096):
            said += data
    except ConnectionResetError:
        pass
    return said


AUTHORIZED = f"authorization: {Token(SECRET.encode()).authorization}\r\n".encode()


def _trickle(sock: socket.socket) -> None:
    def send() -> None:
        try:
            for byte in b"GET /hello HTTP/1.1\r\n" + b"x" * 1000:
                sock.sendall(bytes([byte]))
                time.sleep(0.05)
        except OSError:
            return

    threading.Thread(target=send, daemon=True).start()


def _then(sock: socket.socket, more: bytes) -> None:
    sock.sendall(b"GET /state HTTP/1.1\r\nhost: x\r\n" + AUTHORIZED + b"\r\n")
    assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    sock.sendall(more)


SLOW: dict[str, Callable[[socket.socket], None]] = {
    "silence": lambda sock: None,
    "half a head": lambda sock: sock.sendall(b"GET /hello HTTP/1.1\r\nx-y: "),
    "a head that trickles": _trickle,
    "silence after an answer": lambda sock: _then(sock, b""),
    "half a head after an answer": lambda sock: _then(sock, b"GET /hel"),
    "a body nobody asked for": lambda sock: sock.sendall(
        b"GET /state HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n" + AUTHORIZED + b"\r\nx"
    ),
}


@pytest.mark.parametrize("how", SLOW)
@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_a_slow_client_does_not_hold_the_endpoint(
    how: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "HEAD_S", 0.5)

    async def run() -> None:
        sock = tcp.listen(Address("127.0.0.1", 0)) if way == "tcp" else unix.listen(tmp_path / "control.sock")
        async with served(sock, Token(SECRET.encode()) if way == "tcp" else None) as server:
            await asyncio.to_thread(talk, sock.getsockname())
            for _ in range(100):
                if not server.server_state.connections:
                    break
                await asyncio.sleep(0.02)
            assert not server.server_state.connections

    def talk(name: Any) -> None:
        with socket.socket(socket.AF_INET if way == "tcp" else socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(name)
            begin = time.monotonic()
            SLOW[how](sock)
            drain(sock)
            assert time.monotonic() - begin < 4.0

    asyncio.run(run())


def test_a_request_that_takes_its_time_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease's stream lives for as long as the session."""
    monkeypatch.setattr(http_module, "HEAD_S", 0.3)

    def talk(address: Address) -> None:
        with closing(EngineClient.connect(str(address), settings=settings())) as client:
            lease = client.begin("session-1", 1, ())
            time.sleep(1.0)
            assert not lease.over()
            lease.close()

    over_tcp(talk)


def test_a_body_that_does_not_come_is_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "BODY_S", 0.3)

    def talk(address: Address) -> None:
        with tcp.connect(address, deadline=time.monotonic() + 5) as sock:
            sock.settimeout(10)
            sock.sendall(b"POST /pause HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n" + AUTHORIZED + b"\r\n{")
            assert b"did not arrive within 0.3 s" in drain_answer(sock)

    over_tcp(talk)


def drain_answer(sock: socket.socket) -> bytes:
    said = b""
    while b"}" not in said:
        data = sock.recv(4096)
        assert data, said
        said += data
    return said


def test_sixty_four_idle_connections_do_not_brick_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "HEAD_S", 0.5)

    def talk(address: Address) -> None:
        idle = [tcp.connect(address, deadline=time.monotonic() + 5) for _ in range(70)]
        try:
            time.sleep(1.0)
            EngineClient.connect(str(address), settings=settings()).close()
        finally:
            for sock in idle:
                sock.close()

    over_tcp(talk)
