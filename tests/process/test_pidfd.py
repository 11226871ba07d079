"""Descriptors by pidfd: only from the process that was meant, and every cause that forbids it by its name."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncstack.errors import HandleRefused, ProtocolError, TransportError
from syncstack.transports import pidfd
from syncstack.transports.host_fd.handover import give
from syncstack.transports.host_fd.receiver import HostFdReceiver
from syncstack.transports.host_fd.segment import SenderSegment
from syncstack.wire.link import Link
from syncstack.wire.messages import Handle, Offer
from tests.process import peer
from tests.process.conftest import REPO, environment

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--no-new-privs", "--"]
NEW_PIDS = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--"]

Hold = Callable[..., tuple[Offer, str]]


def works(wrap: Sequence[str]) -> bool:
    try:
        return subprocess.run([*wrap, "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def needs(wrap: Sequence[str]) -> None:
    if not works(wrap):
        pytest.skip(f"this process may not run {wrap[0]}")


def peer_argv(*args: str) -> list[str]:
    return [sys.executable, "-m", "tests.process.peer", *args]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Start senders that hold a segment; returns each one's offer and content."""
    holders: list[subprocess.Popen[str]] = []

    def start(*args: str, wrap: Sequence[str] = ()) -> tuple[Offer, str]:
        holders.append(
            subprocess.Popen(
                [*wrap, *peer_argv("hold", *args)],
                env=environment(tmp_path),
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert holders[-1].stdout is not None
        line = json.loads(holders[-1].stdout.readline())
        return msgspec.convert(line["offer"], Offer), line["content"]

    yield start
    for holder in holders:
        holder.communicate()


def take(offer: Offer, tmp_path: Path, *, profile: str | None = None, wrap: Sequence[str] = ()) -> dict[str, Any]:
    """What a worker in a process of its own makes of an offer; it must hold nothing more than before."""
    argv = [*wrap, *peer_argv("take", msgspec.json.encode(offer).decode())]
    if profile is not None:
        argv = [sys.executable, "-m", "syncstack.cli", "seccomp", "run", profile, "--", *argv]
    done = subprocess.run(
        argv, env=environment(tmp_path), cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("leaked") == 0
    return found


def with_handle(offer: Offer, **change: object) -> Offer:
    return msgspec.structs.replace(offer, handle=msgspec.structs.replace(offer.handle, **change))


def refused(offer: Offer, match: str, kind: type[Exception] = HandleRefused) -> str:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(kind, match=match) as caught:
        HostFdReceiver().open(offer, [])
    assert len(os.listdir("/proc/self/fd")) == len(before)
    return str(caught.value)


def filter_file(tmp_path: Path, errno_ret: int, *names: str) -> str:
    path = tmp_path / "filter.json"
    rule = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": errno_ret}
    path.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}))
    return str(path)


def test_a_descriptor_is_taken_from_the_process_that_was_meant(hold: Hold, tmp_path: Path) -> None:
    offer, content = hold()
    assert take(offer, tmp_path) == {"content": content}


def test_it_works_as_nobody_without_a_capability_under_permissive(hold: Hold, tmp_path: Path) -> None:
    needs(NOBODY)
    offer, content = hold(wrap=NOBODY)
    assert take(offer, tmp_path, profile="permissive", wrap=NOBODY) == {"content": content}


# --- what forbids it


@pytest.mark.parametrize(
    ("denied", "code", "match"),
    [
        ("pidfd_getfd", 1, "a seccomp filter denies pidfd_getfd (observed: pidfd_getfd: EPERM)"),
        ("pidfd_open", 1, "a seccomp filter denies pidfd_open (observed: pidfd_open: EPERM)"),
        ("pidfd_getfd", 38, "a seccomp filter or a sandbox hides pidfd_getfd: kernel"),
        ("pidfd_open", 38, "a seccomp filter or a sandbox hides pidfd_open: kernel"),
    ],
)
def test_a01_a30_a_filter_is_named_with_the_call_that_it_denies(
    hold: Hold, tmp_path: Path, denied: str, code: int, match: str
) -> None:
    offer, _ = hold()
    found = take(offer, tmp_path, profile=filter_file(tmp_path, code, denied))
    assert found["error"] == "HandleRefused"
    assert match in found["text"]
    assert "share a folder" in found["text"]


def test_a01_the_restrictive_profile_is_named(hold: Hold, tmp_path: Path) -> None:
    offer, _ = hold()
    assert "a seccomp filter denies pidfd_open" in take(offer, tmp_path, profile="restrictive")["text"]


def test_a02_another_user_is_the_kernels_refusal_and_no_filters(hold: Hold, tmp_path: Path) -> None:
    needs(NOBODY)
    offer, _ = hold()
    found = take(offer, tmp_path, wrap=NOBODY)
    assert found["error"] == "HandleRefused"
    assert "the sender has another uid (0, 0, 0) than this process (65534)" in found["text"]
    assert "filter" not in found["text"]


def test_a02_a_sender_that_is_not_dumpable_is_the_kernels_refusal(hold: Hold, tmp_path: Path) -> None:
    needs(NOBODY)
    offer, _ = hold("undumpable", wrap=NOBODY)
    found = take(offer, tmp_path, wrap=NOBODY)
    assert "the sender is not dumpable" in found["text"]
    assert "filter" not in found["text"]


def test_a02_a_sender_that_is_not_dumpable_says_so_before_it_offers_anything() -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl(peer.PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        with pytest.raises(TransportError, match=r"not dumpable.*PR_GET_DUMPABLE = 0"):
            pidfd.myself()
    finally:
        prctl(peer.PR_SET_DUMPABLE, 1, 0, 0, 0)
    assert pidfd.myself().pid == os.getpid()


def test_a04_a_descriptor_that_is_not_open_is_not_called_a_permission(hold: Hold) -> None:
    offer, _ = hold()
    text = refused(with_handle(offer, fd=1 << 20), f"process {offer.handle.pid}, has no descriptor {1 << 20}")
    assert "EBADF" in text
    assert "ermission" not in text


def test_a_sender_that_ended_is_said_to_have_ended(hold: Hold) -> None:
    """A zombie: it has its number and its start, and nothing else any more."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        ticks = pidfd._start_ticks(child)
        assert ticks is not None
        process = pidfd.Process(pid=child, pid_ns=pidfd.myself().pid_ns, start_ticks=ticks)
        with pytest.raises(HandleRefused, match=f"process {child}, has ended .*pidfd_getfd: ESRCH"):
            pidfd.take(process, 0)
    finally:
        os.waitpid(child, 0)
    with pytest.raises(HandleRefused, match=f"process {child} is not the sender .*no such process"):
        pidfd.take(process, 0)


@pytest.mark.parametrize(
    ("scope", "match"),
    [("1", r"Yama forbids it .*ptrace_scope is 1"), ("", "a security module"), ("0", "a security module")],
)
def test_a31_yama_and_security_modules_are_told_apart_by_what_else_is_allowed(
    monkeypatch: pytest.MonkeyPatch, scope: str, match: str
) -> None:
    """Fixture: this kernel has neither. The refusal is made up; that /proc/PID/ns/user can be read is real."""
    read = pidfd.read_text
    monkeypatch.setattr(pidfd, "read_text", lambda path: scope if path.name == "ptrace_scope" else read(path))
    monkeypatch.setattr(pidfd, "_call", lambda held, _: (-1, 9 if held == -1 else 1))
    with pytest.raises(HandleRefused, match=match):
        pidfd.take(pidfd.myself(), 0)


# --- whose it is


def test_a08_a_number_of_another_pid_namespace_is_not_looked_at(hold: Hold, tmp_path: Path) -> None:
    needs(NEW_PIDS)
    offer, _ = hold()
    found = take(offer, tmp_path, wrap=NEW_PIDS)
    assert found["error"] == "HandleRefused"
    assert "in different PID namespaces" in found["text"]
    assert f"observed: namespace {offer.handle.pid_ns}" in found["text"]
    assert "shareProcessNamespace" in found["text"]


def test_a08_with_the_proc_of_another_namespace_nothing_is_believed(hold: Hold, tmp_path: Path) -> None:
    wrap = ["unshare", "--pid", "--fork", "--kill-child", "--"]
    needs(wrap)
    offer, _ = hold()
    assert "/proc is that of another PID namespace" in take(offer, tmp_path, wrap=wrap)["text"]


def test_a09_two_senders_of_one_number_never_alias(hold: Hold, tmp_path: Path) -> None:
    """Both are process 1 of their own namespace; this receiver, whose own process 1 is a third, takes from neither."""
    needs(NEW_PIDS)
    offers = [hold(wrap=NEW_PIDS)[0] for _ in range(2)]
    assert [offer.handle.pid for offer in offers] == [1, 1]
    assert len({offer.handle.pid_ns for offer in offers} | {pidfd.myself().pid_ns}) == 3
    for offer in offers:
        refused(offer, "in different PID namespaces")
        lying = with_handle(offer, pid_ns=pidfd.myself().pid_ns)
        refused(lying, "process 1 is not the sender .*it started at tick")


def test_a08_a_stranger_with_the_number_is_told_by_its_start(hold: Hold) -> None:
    sender, stranger = hold()[0], hold()[0]
    assert sender.handle.fd == stranger.handle.fd  # a wrong number would give a descriptor, and without any error
    refused(with_handle(sender, pid=stranger.handle.pid), f"process {stranger.handle.pid} is not the sender")


def test_a08_a_number_that_changes_hands_while_it_is_opened_is_noticed(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, _ = hold()
    ticks = iter([offer.handle.start_ticks, offer.handle.start_ticks + 1])
    own = pidfd.myself()
    monkeypatch.setattr(pidfd, "numbers", lambda: own)
    monkeypatch.setattr(pidfd, "_start_ticks", lambda _: next(ticks))
    refused(offer, "is not the sender")


@pytest.mark.parametrize("other", ["a segment of another", "a standard stream", "a pipe"])
def test_a08_a_wrong_descriptor_is_given_without_error_and_not_taken(hold: Hold, other: str) -> None:
    offer, _ = hold()
    wrong = {
        "a segment of another": lambda: with_handle(offer, **msgspec.structs.asdict(hold()[0].handle)),
        "a standard stream": lambda: with_handle(offer, fd=2),
        "a pipe": lambda: with_handle(offer, fd=0),
    }[other]()
    refused(wrong, "the descriptor is not the sender's segment", TransportError)


@pytest.mark.parametrize("digit", [0, 15, 16, 31])
def test_a_nonce_that_differs_in_either_half_is_refused(hold: Hold, digit: int) -> None:
    offer, _ = hold()
    nonce = list(offer.segment)
    nonce[digit] = "0" if nonce[digit] != "0" else "1"
    wrong = msgspec.structs.replace(offer, segment="".join(nonce))
    refused(wrong, f"not the sender's segment .*expected: nonce {wrong.segment}", TransportError)


# --- what a message says


@pytest.mark.parametrize("kind", ["fabric", "cuda-ipc", "memfd", ""])
def test_a04_d53_an_unknown_kind_is_refused_by_its_name(hold: Hold, kind: str) -> None:
    offer, _ = hold()
    refused(with_handle(offer, kind=kind), f"memory of kind '{kind}' is not known to this worker")


def test_a04_a_kind_is_never_guessed_from_what_came_with_it() -> None:
    """A handle of the other kind with a descriptor beside it, and the reverse: neither is taken for what it is not."""
    segment = SenderSegment(64)
    scm = peer.offer(segment, handle=Handle(kind="memfd-scm", pid=os.getpid(), fd=segment.fd))
    refused(scm, "without its descriptor", ProtocolError)
    with pytest.raises(HandleRefused, match="is not the sender"):
        HostFdReceiver().open(with_handle(peer.offer(segment), start_ticks=1), [segment.fd])
    segment.close()


def test_a05_a_segment_is_known_by_its_nonce_whatever_its_handle_says() -> None:
    segment, receiver = SenderSegment(64), HostFdReceiver()
    for noise in range(1, 100):
        offer = peer.offer(segment)
        noisy = with_handle(offer, fd=offer.handle.fd if noise == 1 else noise, start_ticks=offer.handle.start_ticks)
        receiver.open(noisy, [])
        assert num_mappings(segment) == 2, "the sender's and one of the receiver's"
    receiver.close()
    assert num_mappings(segment) == 1
    segment.close()


def num_mappings(segment: SenderSegment) -> int:
    inode = str(os.fstat(segment.fd).st_ino)
    return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


def test_the_sender_gives_by_the_way_it_is_told() -> None:
    near, far = socket.socketpair()
    segment = SenderSegment(64)
    with Link(near) as link, far:
        assert give(segment.fd, "scm", link) == (Handle(kind="memfd-scm"), (segment.fd,))
        handle, fds = give(segment.fd, "pidfd", link)
        assert (handle.kind, handle.pid, handle.fd, fds) == ("memfd-pidfd", os.getpid(), segment.fd, ())
        link.passes_fds = False
        with pytest.raises(TransportError, match="cannot travel over TCP"):
            give(segment.fd, "scm", link)
    segment.close()
