"""The data link: frames, descriptors, and bytes that are not the protocol."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncstack.errors import DeadlineExceeded, LinkLost, LinkRefused, ProtocolError, SyncstackError
from syncstack.wire.link import MAX_FDS, MAX_FRAME_BYTES, Link, close_fds, greet
from syncstack.wire.messages import PROTOCOL_VERSION, BucketReady, Fault, LinkHello, Message, Offer, StageEnd


def pair() -> tuple[Link, socket.socket]:
    ours, theirs = socket.socketpair()
    return Link(ours), theirs


def soon() -> float:
    return time.monotonic() + 2.0


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_message_and_its_descriptor_arrive_together() -> None:
    left, right = socket.socketpair()
    with Link(left) as sender, Link(right) as receiver:
        read_end, write_end = os.pipe()
        try:
            sender.send(StageEnd(session="s" * 8), fds=[write_end], deadline=soon())
            message, fds = receiver.receive(deadline=soon())
            assert message == StageEnd(session="s" * 8)
            assert len(fds) == 1
            assert not os.get_inheritable(fds[0])
            os.write(fds[0], b"x")
            assert os.read(read_end, 1) == b"x"
            close_fds(fds)
        finally:
            os.close(read_end)
            os.close(write_end)


def test_a_large_message_is_sent_in_parts() -> None:
    left, right = socket.socketpair()
    digests = tuple(f"{i:016x}" for i in range(100_000))
    with Link(left) as sender, Link(right) as receiver:
        bucket = BucketReady(session="s" * 8, first=0, digests=digests)
        thread = threading.Thread(target=lambda: sender.send(bucket, deadline=time.monotonic() + 10))
        thread.start()
        message, _ = receiver.receive(deadline=time.monotonic() + 10)
        thread.join()
        assert message == bucket


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"GET / HTTP/1.1\r\n", "not a syncstack frame"),
        (struct.pack("!2sHI", b"sy", PROTOCOL_VERSION + 1, 0), "another protocol version"),
        (struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, MAX_FRAME_BYTES + 1), "frame too large"),
        (struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, 3) + b"\xc1\xc1\xc1", "known message"),
        (struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, 1) + b"\x80", "known message"),
    ],
)
def test_c05_foreign_bytes_and_another_protocol_are_a_typed_error_at_once(raw: bytes, match: str) -> None:
    link, peer = pair()
    with link, peer:
        peer.sendall(raw)
        with pytest.raises(ProtocolError, match=match):
            link.receive(deadline=soon())


def test_a_field_out_of_bounds_is_refused() -> None:
    link, peer = pair()
    with link, peer:
        hello = {"type": "LinkHello", "role": "root", "rank": 0, "nonce": "n" * 32}
        body = msgspec.msgpack.encode(hello)
        peer.sendall(struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, len(body)) + body)
        with pytest.raises(ProtocolError, match="role"):
            link.receive(deadline=soon())


OFFER = msgspec.to_builtins(
    Offer(session="s" * 8, version=1, segment="0" * 32, segment_bytes=0, generation=0, tensors=())
)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ([1, 2, 3, 4, 5], "Expected `object`, got `array`"),
        (["Offer", list(OFFER.values())], "Expected `object`, got `array`"),
        ({name: value for name, value in OFFER.items() if name != "generation"}, "missing required field `generation`"),
        ({**OFFER, "device": 0}, "unknown field `device`"),
        ({**OFFER, "tensors": [["w", "uint8", [4], 0, 4]]}, r"got `array` - at `\$.tensors\[0\]`"),
        ({**OFFER, "tensors": [{"name": "w", "dtype": "uint8", "shape": [4], "offset": 0}]}, "field `nbytes`"),
        ({**OFFER, "handle": {"kind": "memfd-scm", "extra": 1}}, r"field `extra` - at `\$.handle`"),
    ],
)
def test_a17_a_record_has_names_and_a_malformed_one_is_refused_by_the_fields_name(record: object, match: str) -> None:
    """And not by its place in a tuple, which changes from release to release: the frame's version is compared first."""
    link, peer = pair()
    with link, peer:
        body = msgspec.msgpack.encode(record)
        peer.sendall(struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, len(body)) + body)
        with pytest.raises(ProtocolError, match=match):
            link.receive(deadline=soon())


def test_the_end_of_the_stream_is_link_lost_wherever_it_comes() -> None:
    for cut in (0, 3, 8, 9):
        link, peer = pair()
        with link:
            peer.sendall((struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, 100) + b"x")[:cut])
            assert not link.lost()
            peer.close()
            assert link.lost()
            with pytest.raises(LinkLost):
                link.receive(deadline=soon())


def test_a_silent_peer_is_a_deadline_not_a_hang() -> None:
    link, peer = pair()
    with link, peer:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            link.receive(deadline=begin + 0.2)
        assert time.monotonic() - begin < 2.0


def test_a_peer_that_never_reads_is_a_deadline_not_a_hang() -> None:
    link, peer = pair()
    fault = Fault(session="s", kind="k", text="t" * 8000)
    with link, peer, pytest.raises(DeadlineExceeded):
        deadline = time.monotonic() + 0.5
        while True:
            link.send(fault, deadline=deadline)


def test_descriptors_of_a_bad_frame_are_closed() -> None:
    link, peer = pair()
    with link, peer:
        before = num_fds()
        with open(os.devnull) as null:
            socket.send_fds(peer, [b"XXXXXXXX"], [null.fileno()] * 4)
        with pytest.raises(ProtocolError):
            link.receive(deadline=soon())
        assert num_fds() == before


def test_more_descriptors_than_allowed_are_refused_and_closed() -> None:
    link, peer = pair()
    with link, peer:
        before = num_fds()
        with open(os.devnull) as null:
            # The kernel takes no more at once; a header that comes in two parts may bring more.
            header = struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, 0)
            for part, number in ((header[:3], MAX_FDS), (header[3:], 5)):
                socket.send_fds(peer, [part], [null.fileno()] * number)
        with pytest.raises(ProtocolError, match="too many descriptors"):
            link.receive(deadline=soon())
        assert num_fds() == before


def test_two_trainers_do_not_greet_each_other() -> None:
    left, right = socket.socketpair()
    with Link(left) as one, Link(right) as two:
        two.send(LinkHello(role="trainer", rank=0, nonce="n" * 32), deadline=soon())
        with pytest.raises(LinkRefused, match="expected: a worker"):
            greet(one, role="trainer", rank=0, deadline=soon())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_end_in_a_typed_error(raw: bytes, framed: bool) -> None:
    link, peer = pair()
    with link:
        peer.sendall(struct.pack("!2sHI", b"sy", PROTOCOL_VERSION, len(raw)) + raw if framed else raw)
        peer.close()
        try:
            message, fds = link.receive(deadline=soon())
        except SyncstackError:
            return
        assert isinstance(message, Message)
        assert fds == []


def test_every_message_survives_its_own_encoding() -> None:
    offer = Offer(session="s" * 8, version=1, segment="ab" * 16, segment_bytes=0, generation=2, tensors=())
    left, right = socket.socketpair()
    with Link(left) as sender, Link(right) as receiver:
        sender.send(offer, deadline=soon())
        assert receiver.receive(deadline=soon()) == (offer, [])
