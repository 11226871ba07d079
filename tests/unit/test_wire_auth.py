"""Proving the token: both sides, one connection, one direction; and peers that are slow, hostile or replaying."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncstack.errors import DeadlineExceeded, LinkLost, LinkRefused, ProtocolError, SettingsError, SyncstackError
from syncstack.settings import Settings
from syncstack.threads import in_thread
from syncstack.transports import endpoint as endpoint_module
from syncstack.transports.endpoint import WorkerEndpoint
from syncstack.wire import tcp, unix
from syncstack.wire.auth import AUTH_FRAME_BYTES, Token, prove_as_trainer, prove_as_worker, read_token
from syncstack.wire.link import Link, greet
from syncstack.wire.messages import PROTOCOL_VERSION, Answer, Challenge, Fault, LinkHello, StageEnd, Welcome
from syncstack.wire.tcp import Address

SECRET = b"a secret of at least sixteen bytes"


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def pair() -> tuple[Link, Link]:
    left, right = socket.socketpair()
    return Link(left), Link(right)


def prove(trainer: Token, worker: Token, *, rank: int = 3, at: int = 1, expect: int = 1) -> list[object]:
    """Both halves at once over one pair of sockets; returns what each proved of the other, or what it raised."""
    left, right = pair()
    with left, right:
        futures = [
            in_thread(lambda: prove_as_trainer(left, trainer, rank=rank, worker=expect, deadline=soon()), "trainer"),
            in_thread(lambda: prove_as_worker(right, worker, rank=at, deadline=soon()), "worker"),
        ]
        first, second = (future.exception(10) for future in futures)
        return [first or left.proven, second or right.proven]


def test_one_token_proves_both_sides_with_their_ranks() -> None:
    assert prove(Token(SECRET), Token(SECRET)) == [("worker", 1), ("trainer", 3)]


def test_two_tokens_prove_nothing() -> None:
    left, right = pair()
    with left, right:
        worker = in_thread(lambda: prove_as_worker(right, Token(b"x" * 32), rank=0, deadline=soon()), "worker")
        with pytest.raises(DeadlineExceeded):  # the worker's end says why; its caller then sends a Fault and closes
            prove_as_trainer(left, Token(SECRET), rank=0, worker=0, deadline=soon(0.5))
        assert isinstance(worker.exception(5), LinkRefused)
        assert left.proven is None
        assert right.proven is None


def test_another_rank_than_was_dialled_is_refused_before_the_trainer_proves_anything() -> None:
    left, right = pair()
    with left, right:
        right.send(Challenge(rank=2, nonce=bytes(32)), deadline=soon())
        with pytest.raises(LinkRefused, match="another worker answers"):
            prove_as_trainer(left, Token(SECRET), rank=0, worker=1, deadline=soon())
        left.close()
        with pytest.raises(LinkLost):
            right.receive(deadline=soon())


def test_a_worker_without_the_token_is_refused() -> None:
    left, right = pair()
    with left, right:
        right.send(Challenge(rank=0, nonce=bytes(32)), deadline=soon())
        right.send(Welcome(proof=bytes(32)), deadline=soon())
        with pytest.raises(LinkRefused, match="did not prove that it holds our token"):
            prove_as_trainer(left, Token(SECRET), rank=0, worker=0, deadline=soon())


def test_a_proof_is_not_good_for_another_direction_connection_or_rank() -> None:
    token, challenge, nonce = Token(SECRET), Challenge(rank=0, nonce=bytes(32)), bytes(range(32))
    proofs = {
        token.proof("trainer", challenge, 0, nonce),
        token.proof("worker", challenge, 0, nonce),
        token.proof("trainer", challenge, 1, nonce),
        token.proof("trainer", challenge, 0, bytes(32)),
        token.proof("trainer", Challenge(rank=1, nonce=bytes(32)), 0, nonce),
        token.proof("trainer", Challenge(rank=0, nonce=nonce), 0, nonce),
        Token(SECRET + b"!").proof("trainer", challenge, 0, nonce),
    }
    assert len(proofs) == 7


def test_a_recorded_answer_does_not_open_another_link() -> None:
    token = Token(SECRET)
    trainer, worker = pair()
    with trainer, worker:
        first = in_thread(lambda: prove_as_worker(worker, token, rank=0, deadline=soon()), "worker")
        challenge, _ = trainer.receive(deadline=soon())
        assert isinstance(challenge, Challenge)
        answer = Answer(rank=0, nonce=bytes(32), proof=token.proof("trainer", challenge, 0, bytes(32)))
        trainer.send(answer, deadline=soon())
        first.result(5)
    replayer, worker = pair()
    with replayer, worker:
        replayer.send(answer, deadline=soon())
        with pytest.raises(LinkRefused, match="the trainer did not prove"):
            prove_as_worker(worker, token, rank=0, deadline=soon())


def test_a_reflected_proof_does_not_pass_for_the_workers_own() -> None:
    left, right = pair()
    with left, right:
        right.send(Challenge(rank=0, nonce=bytes(32)), deadline=soon())
        trainer = in_thread(lambda: prove_as_trainer(left, Token(SECRET), rank=0, worker=0, deadline=soon()), "trainer")
        answer, _ = right.receive(deadline=soon())
        assert isinstance(answer, Answer)
        right.send(Welcome(proof=answer.proof), deadline=soon())
        assert isinstance(trainer.exception(5), LinkRefused)


def test_a_peer_must_be_who_it_proved_to_be() -> None:
    left, right = pair()
    with left, right:
        left.proven = ("worker", 0)
        right.send(LinkHello(role="worker", rank=1, nonce="n" * 32), deadline=soon())
        with pytest.raises(LinkRefused, match=r"observed: worker 1; expected: worker 0"):
            greet(left, role="trainer", rank=0, deadline=soon())


def test_a_large_frame_of_a_stranger_is_refused_by_its_header() -> None:
    left, right = socket.socketpair()
    with right, Link(left) as link:
        right.sendall(struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, AUTH_FRAME_BYTES + 1))
        with pytest.raises(ProtocolError, match="frame too large"):
            prove_as_worker(link, Token(SECRET), rank=0, deadline=soon())


ROLES: dict[str, Callable[[Link], None]] = {
    "trainer": lambda link: prove_as_trainer(link, Token(SECRET), rank=0, worker=0, deadline=soon(2)),
    "worker": lambda link: prove_as_worker(link, Token(SECRET), rank=0, deadline=soon(2)),
}
MESSAGES = st.sampled_from(
    [
        Challenge(rank=0, nonce=bytes(32)),
        Answer(rank=0, nonce=bytes(32), proof=bytes(32)),
        Welcome(proof=bytes(32)),
        LinkHello(role="trainer", rank=0, nonce="n" * 32),
        StageEnd(session="s" * 8),
        Fault(session="", kind="k", text="t"),
    ]
)


def framed(body: bytes) -> bytes:
    return struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, len(body)) + body


@pytest.mark.parametrize("role", ROLES)
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.binary(max_size=80).map(framed),
            MESSAGES.map(lambda message: framed(msgspec.msgpack.encode(message))),
        ),
        max_size=4,
    )
)
def test_whatever_a_stranger_says_it_proves_nothing_and_ends_in_a_typed_error(role: str, said: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with theirs, Link(ours) as link:
        theirs.sendall(b"".join(said))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(SyncstackError):
            ROLES[role](link)
        assert link.proven is None


# --- a worker's endpoint over TCP


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[WorkerEndpoint]:
    found = WorkerEndpoint(
        tmp_path / "w.sock", rank=0, link_s=5, tcp=tcp.listen(Address("127.0.0.1", 0)), token=Token(SECRET)
    )
    yield found
    found.close()


def reach(endpoint: WorkerEndpoint) -> socket.socket:
    sock = tcp.connect(Address("127.0.0.1", endpoint.port), deadline=soon())
    sock.settimeout(10)
    return sock


def open_link(endpoint: WorkerEndpoint, secret: bytes = SECRET) -> Link:
    link = Link(reach(endpoint))
    try:
        prove_as_trainer(link, Token(secret), rank=0, worker=0, deadline=soon())
        greet(link, role="trainer", rank=0, deadline=soon())
    except BaseException:
        link.close()
        raise
    return link


def test_over_tcp_a_link_opens_after_both_proofs(endpoint: WorkerEndpoint) -> None:
    with open_link(endpoint) as link:
        assert link.peer is not None
        assert (link.peer.role, link.peer.rank, link.passes_fds) == ("worker", 0, False)
        assert not link.lost()


def test_the_wrong_token_is_told_so(endpoint: WorkerEndpoint) -> None:
    with pytest.raises(
        LinkRefused, match="the peer refused the link: the trainer did not prove that it holds our token"
    ):
        open_link(endpoint, b"another secret of the right length")


def test_frames_before_the_proof_are_not_served(endpoint: WorkerEndpoint) -> None:
    with Link(reach(endpoint)) as link:
        link.send(LinkHello(role="trainer", rank=0, nonce="n" * 32), deadline=soon())
        challenge, _ = link.receive(deadline=soon())
        assert isinstance(challenge, Challenge)
        fault, _ = link.receive(deadline=soon())
        assert isinstance(fault, Fault)
        assert "unexpected message" in fault.text
        with pytest.raises(LinkLost):
            link.receive(deadline=soon())


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03", bytes(64)])
def test_garbage_closes_that_connection_only(endpoint: WorkerEndpoint, said: bytes) -> None:
    with open_link(endpoint) as good:
        with reach(endpoint) as bad:
            bad.sendall(said)
            while bad.recv(4096):
                pass
        assert not good.lost()
        open_link(endpoint).close()


def test_slow_strangers_are_cut_off_and_keep_no_neighbour_out(
    endpoint: WorkerEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "AUTH_S", 1.0)
    strangers = [reach(endpoint) for _ in range(endpoint_module.MAX_STRANGERS)]
    try:
        time.sleep(0.3)
        with pytest.raises(SyncstackError):  # the place of one who proves itself is not that of one who does not
            open_link(endpoint)
        assert endpoint.path is not None
        with Link(unix.connect(endpoint.path, deadline=soon())) as neighbour:
            greet(neighbour, role="trainer", rank=0, deadline=soon())
        begin = time.monotonic()
        for number, sock in enumerate(strangers):
            sock.sendall(b"s"[: number % 2])  # half of them trickle
            while sock.recv(4096):
                pass
        assert time.monotonic() - begin < 5.0
        open_link(endpoint).close()
    finally:
        for sock in strangers:
            sock.close()


def test_a_closed_endpoint_ends_its_links_and_frees_its_port(endpoint: WorkerEndpoint) -> None:
    link = open_link(endpoint)
    before = {thread.name for thread in threading.enumerate()}
    assert "syncstack-accept" in before
    endpoint.close()
    with link, pytest.raises(LinkLost):
        link.receive(deadline=soon())
    with tcp.listen(Address("127.0.0.1", endpoint.port)):
        pass


# --- the token


def test_a_token_shows_itself_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct-horse-battery-staple"
    monkeypatch.setenv("SYNCSTACK_TOKEN", secret)
    found = Settings.load()
    token = found.shared_token()
    assert token is not None
    for text in (repr(token), str(token), repr(found), str(found), str(found.model_dump()), found.model_dump_json()):
        assert secret not in text
    assert secret not in token.authorization


@pytest.mark.parametrize("value", ["short", "", "  fifteen bytes  "])
def test_a_short_token_is_refused_without_being_quoted(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SYNCSTACK_TOKEN", value)
    with pytest.raises(SettingsError, match="expected: 16 to 4096 bytes") as caught:
        Settings.load().shared_token()
    assert not value.strip() or value.strip() not in str(caught.value)


def test_a_token_of_the_wrong_type_is_not_quoted_either() -> None:
    with pytest.raises(SettingsError, match="not shown") as caught:
        Settings.load(token=["hunter2-hunter2-hunter2"])
    assert "hunter2" not in str(caught.value)


def test_the_file_goes_before_the_variable_and_white_space_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    monkeypatch.setenv("SYNCSTACK_TOKEN", "x" * 32)
    monkeypatch.setenv("SYNCSTACK_TOKEN_FILE", str(path))
    token = Settings.load().shared_token()
    assert token is not None
    assert token.authorization == Token(SECRET).authorization
    assert Settings.load(token_file=None, token=SECRET.decode()).shared_token() is not None


def test_without_a_token_the_error_says_how_to_make_one() -> None:
    with pytest.raises(SettingsError, match="listening needs a token.*openssl rand -hex 32"):
        Settings.load().required_token("listening")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o644])
def test_a_token_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_bytes(SECRET)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=f"mode {mode:04o}"):
        read_token(path)


def test_a_folder_a_pipe_nothing_and_somebody_elses_file_are_no_tokens(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in (".", "pipe"):
        with pytest.raises(SettingsError, match="not a regular file"):
            read_token(tmp_path / name)
    with pytest.raises(SettingsError, match="No such file"):
        read_token(tmp_path / "none")
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    (tmp_path / "theirs").write_bytes(SECRET)
    (tmp_path / "theirs").chmod(0o600)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(SettingsError, match="owner uid 12345"):
        read_token(tmp_path / "theirs")


@pytest.mark.parametrize(("mode", "good"), [(0o644, True), (0o440, True), (0o400, True), (0o666, False)])
def test_a_secret_on_a_read_only_mount_may_be_readable(tmp_path: Path, mode: int, good: bool) -> None:
    """As the kubelet and compose mount one: a tmpfs, read-only in the container."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    if _mount(["-t", "tmpfs", "tmpfs", str(folder)]):
        pytest.skip("this process may not mount")
    try:
        (folder / "token").write_bytes(SECRET)
        (folder / "token").chmod(mode)
        assert not _mount(["-o", "remount,ro", str(folder)])
        if good:
            assert read_token(folder / "token").authorization == Token(SECRET).authorization
            assert not _mount(["-o", "remount,rw", str(folder)])
            os.chown(folder / "token", 12345, 12345)  # compose binds the file of the user who started it
            assert not _mount(["-o", "remount,ro", str(folder)])
            assert read_token(folder / "token").authorization == Token(SECRET).authorization
        else:
            with pytest.raises(SettingsError, match="mode 0666"):
                read_token(folder / "token")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(args: list[str]) -> int:
    try:
        return subprocess.run(["mount", *args], check=False, capture_output=True).returncode
    except FileNotFoundError:
        return errno.ENOENT
