"""The torch drop-in with a fake driver: what is lent, what is mapped, what is given back, and what is put in torch."""

from __future__ import annotations

import gc
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from syncstack.compat import borrower as borrower_module
from syncstack.compat import torch_ipc
from syncstack.compat.borrower import Borrower
from syncstack.compat.lender import Entry, Lender
from syncstack.compat.ticket import MAGIC, Copy, Lent, Refused, Ticket, Want, hear, pack, say, unpack
from syncstack.errors import EngineUnreachable, HandleRefused, LinkLost, ProtocolError
from syncstack.facts import collect
from syncstack.transports import pidfd
from syncstack.wire import unix
from syncstack.wire.link import close_fds
from tests.unit.fake_gpu import CHUNK, DEVICE, FakeGpu, tensor_at


class Side:
    """A producer and a consumer in one process, each with a driver of its own."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self.ours, self.theirs = FakeGpu(), FakeGpu()
        self.lender = Lender(folder, self.ours)
        self.borrower = Borrower(lambda: self.theirs)
        self.released: list[int] = []

    def ticket(self, address: int, nbytes: int) -> Ticket:
        entry = Entry(address, nbytes, DEVICE, lambda: self.released.append(address))
        return Ticket(
            native=b"\1e", pidfd=True, process=pidfd.numbers(), fd=self.lender.fd, socket=str(self.lender.path),
            entry=self.lender.lend(entry), device=DEVICE, nbytes=nbytes,
        )  # fmt: skip


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    made = Side(tmp_path)
    yield made
    made.lender.close()


def soon(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


def test_memory_across_chunks_is_shared_and_given_back_when_its_last_tensor_is_gone(side: Side) -> None:
    base = side.ours.expandable(3)
    mine = tensor_at(base + CHUNK - 300, CHUNK + 900)
    mine.copy_(torch.randint(0, 255, (mine.numel(),), dtype=torch.uint8))
    theirs = side.borrower.open(side.ticket(mine.data_ptr(), mine.nbytes))
    part = theirs[5:9]
    assert torch.equal(theirs, mine)
    theirs[7], mine[9] = 11, 12  # one memory
    assert (mine[7], theirs[9]) == (11, 12)
    del theirs
    gc.collect()
    time.sleep(0.05)
    assert not side.released
    assert part[2] == 11
    del part
    soon(lambda: side.released == [mine.data_ptr()])
    assert side.theirs.reserved == {}
    assert side.theirs.open_handles() == 0
    assert all(physical.held == 0 for physical in side.ours.physical.values())


def test_what_the_consumers_driver_refuses_is_copied_and_said_once(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tensor_at(side.ours.expandable(1), 1000).fill_(7)
    for call in ("map", "import_fd"):
        side.theirs.fail.append(call)
        theirs = side.borrower.open(side.ticket(mine.data_ptr(), mine.nbytes))
        assert torch.equal(theirs, mine)
        theirs[0] = 1
        assert mine[0] == 7
    soon(lambda: len(side.released) == 2)
    assert [record.message for record in caplog.records if "copied through the host" in record.message] == [
        "GPU memory of another process is copied through the host: map failed (observed: CUDA_ERROR_FAKE)"
    ]
    assert side.theirs.reserved == {}


def test_plain_memory_that_cannot_be_opened_is_copied(side: Side) -> None:
    mine = tensor_at(side.ours.malloc(CHUNK), 5000).fill_(9)
    theirs = side.borrower.open(side.ticket(mine.data_ptr(), mine.nbytes))
    assert torch.equal(theirs, mine)
    soon(lambda: side.released == [mine.data_ptr()])


def test_an_entry_that_nobody_knows_is_refused_with_a_reason_and_the_next_is_served(side: Side) -> None:
    mine = tensor_at(side.ours.expandable(1), 64).fill_(3)
    known = side.ticket(mine.data_ptr(), mine.nbytes)
    stranger = Ticket(**{name: getattr(known, name) for name in known.__struct_fields__} | {"entry": "0" * 32})
    with pytest.raises(HandleRefused, match="no such entry"):
        side.borrower.open(stranger)
    assert torch.equal(side.borrower.open(known), mine)


def test_a_consumer_that_goes_gives_everything_back(side: Side) -> None:
    mine = tensor_at(side.ours.expandable(1), 64)
    ticket = side.ticket(mine.data_ptr(), mine.nbytes)
    with unix.connect(side.lender.path, deadline=time.monotonic() + 5, kind=socket.SOCK_SEQPACKET) as sock:
        say(sock, Want(entry=ticket.entry))
        answer, fds = hear(sock)
        close_fds(fds)
        assert isinstance(answer, Lent)
        assert (answer.sizes, answer.offset, answer.more, len(fds)) == ((CHUNK,), 0, False, 1)
    soon(lambda: side.released == [mine.data_ptr()])


def test_a_lender_that_is_gone_is_an_error_within_its_time(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrower_module, "ANSWER_S", 0.2)
    ticket = side.ticket(side.ours.expandable(1), 64)
    side.lender.close()
    with pytest.raises(EngineUnreachable, match="nobody listens on"):
        side.borrower.open(ticket)


def test_a_lender_answers_nonsense_with_a_reason(side: Side) -> None:
    with unix.connect(side.lender.path, deadline=time.monotonic() + 5, kind=socket.SOCK_SEQPACKET) as sock:
        for message in (Refused(text="hello"), Copy(entry=secrets.token_hex(16))):
            say(sock, message)
            answer, _ = hear(sock)
            assert isinstance(answer, Refused)
        sock.send(b"\xff not msgpack")
        with pytest.raises(LinkLost):
            hear(sock)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 40, b"\x81\xa6native\xc4\x01x"])
def test_a_handle_that_only_begins_as_ours_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not what it begins as"):
        unpack(MAGIC + data)


# --- in torch


class Native:
    """Torch's own two methods, as far as a machine without a GPU goes."""

    def __init__(self) -> None:
        self.opened: list[tuple[Any, ...]] = []

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        return 0, b"\1e native", storage.nbytes(), 0, b"/torch_1", 3, b"event", False

    def open(self, *args: Any) -> torch.UntypedStorage:
        self.opened.append(args)
        return torch.UntypedStorage(0)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Native]:
    made = Native()

    def share(self: torch.UntypedStorage) -> tuple[Any, ...]:
        return made.share(self)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(made.open), raising=False)
    yield made
    torch_ipc.uninstall()


def released(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    count = lambda *args: found.append(args)  # noqa: E731
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", count, raising=False)
    return found


def test_installed_a_storage_goes_by_descriptors_and_uninstalled_as_before(
    native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, gpu = released(monkeypatch), FakeGpu()
    tmp_path.chmod(0o700)
    before = dict(vars(torch.UntypedStorage))
    torch_ipc.install(folder=tmp_path, driver=lambda: gpu)
    torch_ipc.install(folder=tmp_path / "another", driver=lambda: gpu)  # nothing more happens
    monkeypatch.setattr(borrower_module, "_tried", lambda ticket: False)
    mine = tensor_at(gpu.expandable(2), CHUNK + 8).fill_(5)
    told = mine.untyped_storage()._share_cuda_()
    assert told[1].startswith(MAGIC)
    assert told[2:7] == (mine.nbytes, 0, b"/torch_1", 3, b"event")
    theirs = torch.UntypedStorage._new_shared_cuda(*told)
    seen = torch.empty(0, dtype=torch.uint8).set_(theirs)
    assert torch.equal(seen, mine)
    seen[0] = 77
    assert mine[0] == 77
    assert native.opened == []
    del seen, theirs
    soon(lambda: counts == [(b"/torch_1", 3)])
    torch_ipc.uninstall()
    torch_ipc.uninstall()
    assert dict(vars(torch.UntypedStorage)) == before
    assert list(tmp_path.glob("*.sock")) == []


@pytest.mark.parametrize(
    "kind",
    [
        "malloc",
        pytest.param(
            "expandable",
            marks=pytest.mark.skipif(
                collect().syscalls["pidfd_getfd"].verdict != "ok",
                reason="pidfd_getfd is not allowed here, which is the rule: torch's own way does not work",
            ),
        ),
    ],
)
def test_where_torchs_own_way_works_it_is_taken_and_counts_by_itself(
    kind: str, native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, gpu = released(monkeypatch), FakeGpu()
    tmp_path.chmod(0o700)
    torch_ipc.install(folder=tmp_path, driver=lambda: gpu)
    address = gpu.malloc(CHUNK) if kind == "malloc" else gpu.expandable(1)
    told = tensor_at(address, 100).untyped_storage()._share_cuda_()
    torch.UntypedStorage._new_shared_cuda(*told)
    assert [args[1] for args in native.opened] == [b"\1e native"]
    (patch,) = torch_ipc._INSTALLED
    assert patch._lender is not None
    lender = patch._lender[1]
    soon(lambda: not lender._entries)
    assert counts == []
    assert "import_fd" not in gpu.calls


def test_handles_that_are_not_ours_are_torchs_business(native: Native, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    torch_ipc.install(folder=tmp_path, driver=FakeGpu)
    torch.UntypedStorage._new_shared_cuda(0, b"\1c other", 8, 0, b"", 0, b"", False)
    assert native.opened == [(0, b"\1c other", 8, 0, b"", 0, b"", False)]


def test_without_a_driver_torchs_own_handle_is_shared_and_that_is_said_once(
    native: Native, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> FakeGpu:
        raise HandleRefused("no driver here")

    tmp_path.chmod(0o700)
    torch_ipc.install(folder=tmp_path, driver=missing)
    for _ in range(2):
        assert torch.empty(8, dtype=torch.uint8).untyped_storage()._share_cuda_()[1] == b"\1e native"
    assert [record.levelno for record in caplog.records if "own handles" in record.message] == [logging.WARNING]


def test_a_ticket_survives_the_way() -> None:
    ticket = Ticket(
        native=b"\0\xff",
        pidfd=False,
        process=pidfd.numbers(),
        fd=3,
        socket="/s",
        entry="a" * 32,
        device="GPU-1",
        nbytes=9,
    )
    assert unpack(pack(ticket)) == ticket
