"""A worker whose import fails is heard at once, whatever the sender is doing, and costs the sender no memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from syncstack.errors import DeadlineExceeded, HandleRefused, LinkLost, SyncstackError, TransportError
from syncstack.transports import pidfd
from syncstack.transports.host_fd.sender import HostFdSender
from syncstack.weights.manifest import Wanted
from syncstack.weights.meta import ParamMeta
from syncstack.wire import tcp
from syncstack.wire.auth import Token, prove_as_trainer
from syncstack.wire.link import Link, greet
from syncstack.wire.tcp import Address
from tests.process.conftest import REPO, environment, under
from tests.process.peer import SECRET

NUM_TENSORS = 8
WANTED = [
    Wanted(meta=ParamMeta(name=f"w{i}", dtype="float32", shape=(1024,)), source=f"w{i}") for i in range(NUM_TENSORS)
]

Serve = Callable[..., Link]


class Source:
    """Gives tensors; a slow one only after ``go``."""

    def __init__(self, *, slow: bool) -> None:
        self.go, self.asked = threading.Event(), threading.Event()
        if not slow:
            self.go.set()

    def metadata(self) -> Sequence[ParamMeta]:
        return [want.meta for want in WANTED]

    def aliases(self) -> dict[str, str]:
        return {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, want in enumerate(WANTED):
            self.asked.set()
            self.go.wait(60)
            yield want.source, torch.full(want.meta.shape, float(number))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a worker's endpoint in a process of its own and open a link to it."""
    peers: list[subprocess.Popen[str]] = []
    links: list[Link] = []

    def start(*args: str, profile: str | None = None) -> Link:
        argv = under(profile, [sys.executable, "-m", "tests.process.peer", "serve", *args])
        pipe = subprocess.PIPE
        peers.append(
            subprocess.Popen(argv, env=environment(tmp_path), cwd=REPO, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        )
        assert peers[-1].stdout is not None
        port = int(peers[-1].stdout.readline())
        deadline = time.monotonic() + 10
        link = Link(tcp.connect(Address("127.0.0.1", port), deadline=deadline))
        links.append(link)
        prove_as_trainer(link, Token(SECRET), rank=0, worker=0, deadline=deadline)
        greet(link, role="trainer", rank=0, deadline=deadline)
        return link

    yield start
    for link in links:
        link.close()
    for peer in peers:
        peer.communicate()


@pytest.fixture
def sender() -> Iterator[HostFdSender]:
    found = HostFdSender(bucket_bytes=4096)
    yield found
    found.close()


def stage(sender: HostFdSender, source: Source, *links: Link, session: str = "session-1", wait_s: float = 10) -> int:
    _, staged = sender.stage(source, WANTED, links, session=session, version=1, wait_s=wait_s)
    return staged[0].digests_equal


def hang_up_when_asked(source: Source, link: Link) -> None:
    """As a worker's death would: the end of the stream, while the source has not answered."""
    threading.Thread(target=lambda: source.asked.wait(10) and link.close(), daemon=True).start()


def referenced() -> set[str]:
    """Inodes of the segments that this process has mapped or open."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:syncstack" in line]
    entries = [entry.path for entry in os.scandir("/proc/self/fd")]
    fds = [path for path in entries if os.path.lexists(path) and "memfd:syncstack" in os.readlink(path)]
    return {fields[4] for fields in maps} | {str(os.stat(path).st_ino) for path in fds}


@pytest.mark.parametrize(
    ("args", "profile", "kind", "match"),
    [
        ([], "restrictive", HandleRefused, "refused what it was sent: .*a seccomp filter denies pidfd_open"),
        (["broken"], None, TransportError, "refused what it was sent: RuntimeError: broken inside the import"),
    ],
    ids=["denied by a filter", "raises"],
)
def test_a03_a_refused_import_is_heard_within_two_seconds_and_frees_the_senders_memory(
    serve: Serve, sender: HostFdSender, args: list[str], profile: str | None, kind: type[SyncstackError], match: str
) -> None:
    link, source = serve(*args, profile=profile), Source(slow=True)
    before, begin = referenced(), time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        stage(sender, source, link)
    assert time.monotonic() - begin < 2.0
    assert args == [] or source.asked.is_set(), "the source is busy, and was not waited for"
    assert referenced() <= before, f"still referenced, while {caught.value!r} is"
    source.go.set()


def test_a03_one_refusal_ends_it_for_all_links(serve: Serve, sender: HostFdSender) -> None:
    good, bad, source = serve(), serve("broken"), Source(slow=True)
    with pytest.raises(TransportError, match="broken inside the import"):
        stage(sender, source, good, bad)
    source.go.set()


def test_the_same_link_serves_the_next_session_after_a_refusal(
    serve: Serve, sender: HostFdSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sender had still said of the refused session is skipped."""
    link, own = serve(), pidfd.myself()
    with monkeypatch.context() as patch:
        patch.setattr(pidfd, "myself", lambda: msgspec.structs.replace(own, start_ticks=own.start_ticks + 1))
        with pytest.raises(HandleRefused, match="is not the sender"):
            stage(sender, Source(slow=False), link)
    assert stage(sender, Source(slow=False), link, session="session-2") == NUM_TENSORS
    assert stage(sender, Source(slow=False), link, session="session-3") == NUM_TENSORS


def test_a_source_that_is_still_busy_with_a_failed_version_is_not_asked_twice_at_once(
    serve: Serve, sender: HostFdSender
) -> None:
    link, good, source = serve(), serve(), Source(slow=True)
    hang_up_when_asked(source, link)
    with pytest.raises(LinkLost):
        stage(sender, source, link)
    with pytest.raises(DeadlineExceeded, match="has not returned from the version that failed within 0.2 s"):
        stage(sender, Source(slow=False), good, session="session-2", wait_s=0.2)
    source.go.set()
    assert stage(sender, Source(slow=False), good, session="session-3") == NUM_TENSORS


def test_a_worker_that_dies_while_the_source_is_busy_is_noticed_at_once(serve: Serve, sender: HostFdSender) -> None:
    link, source = serve(), Source(slow=True)
    hang_up_when_asked(source, link)
    before, begin = referenced(), time.monotonic()
    with pytest.raises(LinkLost):
        stage(sender, source, link)
    assert time.monotonic() - begin < 2.0
    assert referenced() <= before
    source.go.set()


def test_what_the_source_raises_is_raised(serve: Serve, sender: HostFdSender) -> None:
    class Broken(Source):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "w0", torch.ones(1024)
            raise KeyError("the optimiser went away")

    link, before = serve(), referenced()
    with pytest.raises(KeyError, match="optimiser went away") as caught:
        stage(sender, Broken(slow=False), link)
    time.sleep(0.1)
    assert referenced() <= before, caught
