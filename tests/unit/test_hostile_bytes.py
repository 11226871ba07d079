"""Every place where bytes enter, with bytes that nobody meant: pickles that would run, and anything at all."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from syncstack import errors
from syncstack.errors import ModelFolderError, ProfileError, ProtocolError, SettingsError, SyncstackError, UsageError
from syncstack.plan.cli import read_hello
from syncstack.refit.messages import ErrorReply
from syncstack.refit.ranks import Done, Order
from syncstack.seccomp.load import load
from syncstack.transports.endpoint import WorkerEndpoint
from syncstack.weights.checkpoint import read_metas
from syncstack.wire import tcp
from syncstack.wire.auth import Token, read_token
from syncstack.wire.link import Link
from syncstack.wire.messages import PROTOCOL_VERSION
from syncstack.wire.tcp import Address
from tests.unit.test_wire_control import SECRET, over_tcp

ROUTES = ("begin", "pause", "load", "verify", "commit", "resume", "abort", "hello", "state", "nothing")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it went off"


@pytest.fixture(params=range(6), ids="protocol-{}".format)
def bomb(request: pytest.FixtureRequest, marker: Path) -> bytes:
    return pickle.dumps(Bomb(marker), protocol=request.param)


def test_the_bomb_would_go_off(bomb: bytes, marker: Path) -> None:
    pickle.loads(bomb)
    assert marker.exists()


def framed(body: bytes) -> bytes:
    return struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, len(body)) + body


class TestE03:
    """A pickle bomb in every place where bytes enter does nothing."""

    def test_e03_on_a_data_link(self, bomb: bytes, marker: Path) -> None:
        for raw in (bomb + bytes(16), framed(bomb)):
            ours, theirs = socket.socketpair()
            with Link(ours) as link, theirs:
                theirs.sendall(raw)
                with pytest.raises(ProtocolError):
                    link.receive(deadline=time.monotonic() + 2)
        assert not marker.exists()

    def test_e03_before_the_proof(self, bomb: bytes, marker: Path) -> None:
        listener = tcp.listen(Address("127.0.0.1", 0))
        endpoint = WorkerEndpoint(None, rank=0, link_s=5, tcp=listener, token=Token(SECRET.encode()))
        try:
            for raw in (bomb + bytes(16), framed(bomb)):
                with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as sock:
                    sock.sendall(raw)
                    while sock.recv(1 << 16):
                        pass
        except ConnectionResetError:
            pass
        finally:
            endpoint.close()
        assert not marker.exists()

    def test_e03_on_the_control_endpoint(self, bomb: bytes, marker: Path) -> None:
        kinds = ("application/json", "application/octet-stream", "application/x-pickle")

        def talk(address: Address) -> None:
            headers = {"Authorization": Token(SECRET.encode()).authorization}
            with httpx.Client(base_url=f"http://{address.netloc}", trust_env=False, headers=headers) as client:
                for route in ROUTES:
                    for kind in kinds:
                        response = client.post(f"/{route}", content=bomb, headers={"content-type": kind})
                        assert 400 <= response.status_code < 500, (route, response.text)

        over_tcp(talk)
        assert not marker.exists()

    def test_e03_between_the_ranks_of_a_trainer(self, bomb: bytes, marker: Path) -> None:
        for kind in (Order, Done):
            with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
                msgspec.msgpack.decode(bomb, type=kind)
        assert not marker.exists()

    def test_e03_in_a_file_that_is_read(self, bomb: bytes, marker: Path, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(bomb)
        file.chmod(0o600)
        with pytest.raises(UsageError):
            read_hello(file)
        with pytest.raises(ProfileError):
            load(str(file))
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes(bomb)
            with pytest.raises(ModelFolderError):
                read_metas(tmp_path)
            (tmp_path / "config.json").write_text("{}")
        try:
            read_token(file)  # it may be any bytes
        except SettingsError as error:
            assert "went off" not in str(error)
        assert not marker.exists()


def test_any_body_on_any_route_is_a_typed_error() -> None:
    """Also bodies that are nearly right: JSON of other types, and names that belong elsewhere."""
    json = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=8), inner, max_size=5),
        max_leaves=12,
    )
    bodies = st.binary(max_size=300) | json.map(msgspec.json.encode)

    def talk(address: Address) -> None:
        headers = {"Authorization": Token(SECRET.encode()).authorization}
        with httpx.Client(base_url=f"http://{address.netloc}", trust_env=False, headers=headers) as client:

            @given(st.sampled_from(ROUTES), bodies)
            @hypothesis(max_examples=400, deadline=None)
            def check(route: str, body: bytes) -> None:
                response = client.post(f"/{route}", content=body)
                assert 400 <= response.status_code < 500, (response.status_code, response.text)
                if response.status_code in (404, 405):
                    return  # no such route, or not by POST
                reply = msgspec.json.decode(response.content, type=ErrorReply)
                assert issubclass(getattr(errors, reply.error), SyncstackError)

            check()
            state = client.get("/state").json()
            assert (state["step"], state["version"]) == ("serving", 0)

    over_tcp(talk)


NAMES = st.sampled_from(["session", "version", "tensors", "stand_s", "mode", "deadline_s", "reason", "name", "shape"])
