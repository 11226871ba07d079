"""The bytes of a version on a link: how they are cut, where they land, and memory that no reader sees change."""

from __future__ import annotations

import mmap
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncstack.errors import DeadlineExceeded, DigestMismatch, LinkLost, PlanError, ProtocolError, TransportError
from syncstack.transports import SPOKEN
from syncstack.transports.senders import make_sender
from syncstack.transports.session import LinkServer
from syncstack.transports.staged import StagedVersion
from syncstack.transports.stream.memory import OwnMemory
from syncstack.transports.stream.receiver import StreamReceiver
from syncstack.transports.stream.sender import _parts, _Value, pieces_of
from syncstack.weights.digest import digest
from syncstack.weights.manifest import TensorSlot, Wanted, layout
from syncstack.weights.meta import ParamMeta
from syncstack.wire.link import Link
from syncstack.wire.messages import (
    MAX_PIECE_BYTES,
    BucketReady,
    Fault,
    Handle,
    Message,
    Offer,
    Piece,
    Staged,
    StageEnd,
)

SESSION = "s" * 8


def soon() -> float:
    return time.monotonic() + 5.0


@contextmanager
def linked() -> Iterator[tuple[Link, Link]]:
    left, right = socket.socketpair()
    with Link(left) as one, Link(right) as two:
        yield one, two


def slot(**change: object) -> TensorSlot:
    fields = {"name": "w", "dtype": "uint8", "shape": (64,), "offset": 0, "nbytes": 64}
    return TensorSlot(**{**fields, **change})  # type: ignore[arg-type]


def offer(*slots: TensorSlot, **change: object) -> Offer:
    fields = {
        "session": SESSION,
        "version": 1,
        "segment": secrets.token_hex(16),
        "segment_bytes": 64 * max(1, len(slots)),
        "generation": 0,
        "handle": Handle(kind="stream"),
        "tensors": slots or (slot(),),
    }
    return Offer(**{**fields, **change})  # type: ignore[arg-type]


# --- on the link


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=3000), max_size=700), st.integers(1, 5000))
def test_bytes_come_as_they_were_sent_however_they_are_cut_and_frames_follow(parts: list[bytes], most: int) -> None:
    whole = b"".join(parts)
    with linked() as (one, two):

        def send() -> None:
            for piece in pieces_of([memoryview(part) for part in parts], most):
                one.send_bytes(piece, deadline=soon())
            one.send(StageEnd(session=SESSION), deadline=soon())

        thread = threading.Thread(target=send)
        thread.start()
        into = bytearray(len(whole))
        two.receive_bytes(memoryview(into), deadline=soon())
        assert two.receive(deadline=soon()) == (StageEnd(session=SESSION), [])
        thread.join()
    assert bytes(into) == whole


@given(st.lists(st.binary(max_size=50)), st.integers(1, 60))
def test_pieces_are_full_but_for_the_last(parts: list[bytes], most: int) -> None:
    pieces = [b"".join(piece) for piece in pieces_of([memoryview(part) for part in parts], most)]
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == most for piece in pieces[:-1])
    assert all(0 < len(piece) <= most for piece in pieces[-1:])


def test_skipping_leaves_the_next_frame() -> None:
    with linked() as (one, two):
        thread = threading.Thread(target=lambda: one.send_bytes([memoryview(bytes(300_000))], deadline=soon()))
        thread.start()
        two.skip_bytes(300_000, deadline=soon())
        thread.join()
        one.send(StageEnd(session=SESSION), deadline=soon())
        assert two.receive(deadline=soon())[0] == StageEnd(session=SESSION)


def test_the_end_inside_the_bytes_is_link_lost_and_silence_a_deadline() -> None:
    with linked() as (one, two):
        one.send_bytes([memoryview(b"half")], deadline=soon())
        with pytest.raises(DeadlineExceeded, match="waiting for weights"):
            two.receive_bytes(memoryview(bytearray(8)), deadline=time.monotonic() + 0.2)
        with pytest.raises(DeadlineExceeded, match="sending weights"):
            one.send_bytes([memoryview(bytes(8 << 20))], deadline=time.monotonic() + 0.2)
        one.end()
        assert one.lost()
        with pytest.raises(LinkLost, match="inside the weights"):
            two.skip_bytes(64 << 20, deadline=soon())
        two.send(StageEnd(session=SESSION), deadline=soon())
        assert one.receive(deadline=soon())[0] == StageEnd(session=SESSION)  # it may still say why


# --- what is sent


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parts_of_all_buckets_are_the_data_area(dtype: str) -> None:
    values = {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "plain": torch.arange(100.0).to(getattr(torch, dtype)),
        "sliced": torch.arange(20.0).view(4, 5)[:, 1:4],
    }
    wanted = [
        Wanted(meta=ParamMeta(name=name, dtype=dtype, shape=tuple(value.shape)), source=name)
        for name, value in values.items()
    ]
    alias = ParamMeta(name="alias", dtype=dtype, shape=tuple(values["plain"].shape))
    wanted.insert(4, Wanted(meta=alias, source="plain"))
    manifest = layout(wanted)
    sent, area = 0, b""
    for want, place in zip(wanted, manifest.tensors, strict=True):
        value = _Value(place, values[want.source])
        parts, sent = _parts([(place, value)], sent)
        area += b"".join(parts)
        assert value.digest == digest(value.data)
    assert (len(area), sent) == (manifest.total_bytes, manifest.total_bytes)
    for want, place in zip(wanted, manifest.tensors, strict=True):
        raw = area[place.offset : place.offset + place.nbytes]
        expected = values[want.source].to(getattr(torch, dtype)).contiguous()
        assert raw == expected.reshape(-1).view(torch.uint8).numpy().tobytes(), place.name


def test_a_value_that_is_plain_is_not_copied() -> None:
    value = torch.arange(64, dtype=torch.uint8)
    found = _Value(slot(), value)
    value[0] = 99
    assert found.data[0] == 99


def test_every_transport_of_this_build_has_a_sender_and_no_other() -> None:
    for name in SPOKEN:
        try:
            make_sender(name, bucket_bytes=4096).close()
        except TransportError as error:
            assert name.startswith("cuda_")
            assert "the CUDA driver" in str(error) or "cuInit" in str(error)
    with pytest.raises(PlanError, match="'disk' is not in this build .expected: cuda_fd, .*, collective, stream"):
        make_sender("disk", bucket_bytes=4096)


# --- the worker's memory


def test_memory_is_used_again_only_when_nothing_that_was_lent_is_left() -> None:
    memory = OwnMemory(4096)
    memory.data[:64] = bytes(range(64))
    memory.protect()
    tensor = torch.frombuffer(bytearray(memory.lend(0, 64)), dtype=torch.uint8)
    assert memory.reclaim(), "a copy does not count"
    memory.protect()
    version = memory.generation
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors, and says so once in a process
        tensor = torch.frombuffer(memory.lend(0, 64), dtype=torch.uint8)[32:]
    assert not memory.reclaim()
    assert memory.generation == version + 1, "a loader that is about to borrow sees that it is too late"
    memory.close()
    assert tensor.tolist() == list(range(32, 64))


def test_a_loader_that_writes_ends_its_process_and_changes_nothing() -> None:
    code = (
        "import torch, warnings; warnings.simplefilter('ignore')\n"
        "from syncstack.transports.stream.memory import OwnMemory\n"
        "memory = OwnMemory(4096); memory.data[0] = 7; memory.protect()\n"
        "torch.frombuffer(memory.lend(0, 64), dtype=torch.uint8)[0] = 1\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGSEGV


def test_a_large_announcement_costs_no_memory_before_bytes_come_and_an_absurd_one_is_refused() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    version = StreamReceiver().open(offer(segment_bytes=1 << 30))
    assert resident() - before < 16 << 20
    version.place(64)[:] = bytes(64)
    with pytest.raises(TransportError, match="no room for the weights.*Nothing was received.*engine's container"):
        StreamReceiver().open(offer(segment_bytes=1 << 48))


def staged(receiver: StreamReceiver, fill: int) -> StagedVersion:
    version = receiver.open(offer())
    version.place(64)[:] = bytes([fill] * 64)
    version.read_bucket(BucketReady(session=SESSION, first=0, digests=(digest(bytes([fill] * 64)),)))
    assert version.finish_staging().digests_equal == 1
    return version


def test_d04_d45_a_version_that_a_loader_still_reads_is_never_overwritten() -> None:
    receiver = StreamReceiver()
    first = staged(receiver, 1)
    ((_, held),) = first.views()
    address = held.data_ptr()
    first.close()
    second = staged(receiver, 2)
    ((_, other),) = second.views()
    assert (held.tolist(), other.tolist()) == ([1] * 64, [2] * 64)
    with pytest.raises(TransportError, match="while the engine was reading"):
        first.check_unchanged()
    kept = other.data_ptr()
    assert kept != address
    del other
    second.close()
    ((_, third),) = staged(receiver, 3).views()
    assert third.data_ptr() == kept, "nobody read it any more: no new memory"
    receiver.close()
    assert third.tolist() == [3] * 64


def test_c31_what_does_not_belong_to_the_offer_is_refused() -> None:
    version = StreamReceiver().open(offer(slot(), slot(name="v", offset=64)))
    with pytest.raises(ProtocolError, match="announced before their bytes came .observed: 0 bytes"):
        version.read_bucket(BucketReady(session=SESSION, first=0, digests=("0" * 16,)))
    version.place(64)[:] = bytes(64)
    with pytest.raises(ProtocolError, match="more bytes than were offered .observed: 129 bytes; expected: <= 128"):
        version.place(65)
    with pytest.raises(DigestMismatch, match="w arrived with another content"):
        version.read_bucket(BucketReady(session=SESSION, first=0, digests=("0" * 16,)))
    with pytest.raises(ProtocolError, match="ended early"):
        version.finish_staging()
    with pytest.raises(ProtocolError, match="do not fit its segment"):
        StreamReceiver().open(offer(slot(offset=64)))


# --- a conversation


class Versions:
    """The registry of one link, in the test."""

    def __init__(self) -> None:
        self.found: dict[str, StagedVersion] = {}

    def register(self, version: StagedVersion) -> None:
        self.found[version.offer.session] = version

    def drop(self, session: str, share: int | None = None) -> None:
        self.found.pop(session).close()


@contextmanager
def served() -> Iterator[tuple[Link, Versions, list[BaseException]]]:
    """A worker's end of a link in a thread, and our end."""
    ended: list[BaseException] = []
    versions = Versions()
    with linked() as (ours, theirs):
        server = LinkServer(theirs, versions, link_s=2.0)

        def run() -> None:
            try:
                server.run()
            except BaseException as error:  # noqa: BLE001 - what the endpoint's thread would see
                ended.append(error)
            theirs.close()

        thread = threading.Thread(target=run)
        thread.start()
        yield ours, versions, ended
        ours.close()
        thread.join()
        server.close()


def send(link: Link, *messages: Message | bytes) -> None:
    for message in messages:
        if isinstance(message, bytes):
            link.send_bytes([memoryview(message)], deadline=soon())
        else:
            link.send(message, deadline=soon())


def stage_whole(link: Link, session: str) -> None:
    ready = BucketReady(session=session, first=0, digests=(digest(bytes(64)),))
    send(link, offer(session=session), Piece(session=session, nbytes=64), bytes(64), ready, StageEnd(session=session))
    answer, _ = link.receive(deadline=soon())
    assert isinstance(answer, Staged), answer
    assert answer.session == session


LIES: list[tuple[list[Message | bytes], str]] = [
    ([offer(), Piece(session=SESSION, nbytes=65), bytes(65)], "more bytes than were offered"),
    ([offer(), BucketReady(session=SESSION, first=0, digests=("0" * 16,))], "before their bytes came"),
    ([offer(slot(nbytes=8)), Piece(session=SESSION, nbytes=9), bytes(9)], "do not fit its segment"),
    ([offer(segment_bytes=1 << 48), Piece(session=SESSION, nbytes=MAX_PIECE_BYTES), bytes(MAX_PIECE_BYTES)], "no room"),
    ([offer(handle=Handle(kind="teleport")), Piece(session=SESSION, nbytes=1), b"x"], "'teleport' is not known"),
]


@pytest.mark.parametrize(("said", "match"), LIES, ids=[match for _, match in LIES])
def test_a_refused_session_keeps_the_link_in_step(said: list[Message | bytes], match: str) -> None:
    """The Fault comes at once, what is still said of the session is skipped with its bytes, and the next one works."""
    with served() as (link, versions, ended):
        thread = threading.Thread(target=send, args=(link, *said))
        thread.start()
        answer, _ = link.receive(deadline=soon())
        thread.join()
        assert isinstance(answer, Fault)
        assert match in answer.text
        more = Piece(session=SESSION, nbytes=100)
        ready = BucketReady(session=SESSION, first=0, digests=("0" * 16,))
        send(link, more, bytes(100), ready, more, bytes(100), StageEnd(session=SESSION))
        stage_whole(link, "session-2")
        stage_whole(link, "session-3")
        assert list(versions.found) == ["session-3"]
        assert not ended


def test_bytes_of_no_session_end_the_link() -> None:
    with served() as (link, _, ended):
        send(link, Piece(session=SESSION, nbytes=64))
        link.end()
        with pytest.raises(LinkLost):
            link.receive(deadline=soon())
    assert isinstance(ended[0], ProtocolError)
    assert "unexpected message (observed: Piece" in str(ended[0])


def test_half_a_piece_ends_the_link_and_the_version() -> None:
    with served() as (link, versions, ended):
        send(link, offer(), Piece(session=SESSION, nbytes=64), bytes(32))
        while not versions.found:
            time.sleep(0.01)
        link.end()
        with pytest.raises(LinkLost):
            link.receive(deadline=soon())
    assert isinstance(ended[0], LinkLost)
    assert versions.found == {}


def test_a_silent_sender_meets_the_deadline_inside_a_piece() -> None:
    with served() as (link, _, ended):
        send(link, offer(), Piece(session=SESSION, nbytes=64), bytes(32))
        begin = time.monotonic()
        with pytest.raises(LinkLost):
            link.receive(deadline=soon())
        assert 1.5 < time.monotonic() - begin < 4
    assert isinstance(ended[0], DeadlineExceeded)


def test_the_memory_of_one_transport_is_given_up_for_that_of_the_other() -> None:
    from syncstack.transports.host_fd.segment import SenderSegment

    segment = SenderSegment(64)
    segment.begin_write()
    segment.end_write()
    with served() as (link, _, _):
        for number in range(3):
            stage_whole(link, f"session-{number}")
            name = f"sealed-{number}"
            message = offer(session=name, segment=segment.nonce, generation=2, handle=Handle())
            link.send(message, fds=[segment.fd], deadline=soon())
            ready = BucketReady(session=name, first=0, digests=(digest(bytes(64)),))
            send(link, ready, StageEnd(session=name))
            assert isinstance(link.receive(deadline=soon())[0], Staged)
    segment.close()
