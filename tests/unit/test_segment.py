"""The sealed memfd: what the kernel promises the receiver, and descriptors that are not ours."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from syncstack.errors import DigestMismatch, ProtocolError, TransportError
from syncstack.transports.host_fd import sender as sender_module
from syncstack.transports.host_fd.receiver import HostFdReceiver
from syncstack.transports.host_fd.segment import HEADER_BYTES, ReceiverSegment, SenderSegment
from syncstack.transports.staged import StagedVersion
from syncstack.weights.digest import digest
from syncstack.weights.manifest import TensorSlot
from syncstack.wire.messages import BucketReady, Offer


def slot(**change: object) -> TensorSlot:
    fields = {"name": "w", "dtype": "uint8", "shape": (64,), "offset": 0, "nbytes": 64}
    return TensorSlot(**{**fields, **change})  # type: ignore[arg-type]


def offer(segment: SenderSegment, generation: int, *slots: TensorSlot) -> Offer:
    return Offer(
        session="s" * 8,
        version=1,
        segment=segment.nonce,
        segment_bytes=segment.data_bytes,
        generation=generation,
        tensors=slots or (slot(),),
    )


def staged(segment: SenderSegment) -> StagedVersion:
    generation = segment.begin_write()
    segment.data[:64] = bytes(range(64))
    segment.end_write()
    version = HostFdReceiver().open(offer(segment, generation), [segment.fd])
    version.read_bucket(BucketReady(session="s" * 8, first=0, digests=(digest(bytes(range(64))),)))
    version.finish_staging()
    return version


def test_the_receiver_sees_what_the_sender_writes_without_a_copy() -> None:
    segment = SenderSegment(64)
    ((name, view),) = staged(segment).views()
    assert name == "w"
    assert view.tolist() == list(range(64))
    segment.data[0] = 99
    assert view[0] == 99


def test_nobody_else_can_write_shrink_or_reopen_it() -> None:
    segment = SenderSegment(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"x", HEADER_BYTES)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    receiver = ReceiverSegment(segment.fd, nonce=segment.nonce, data_bytes=4096)
    with pytest.raises(TypeError):
        receiver.data[0] = 1


def test_a_file_or_an_unsealed_memfd_is_refused(tmp_path: object) -> None:
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, HEADER_BYTES + 64)
    try:
        with pytest.raises(TransportError, match="not the sender's segment"):
            ReceiverSegment(unsealed, nonce="ab" * 16, data_bytes=64)
    finally:
        os.close(unsealed)
    with open(os.devnull) as null, pytest.raises(TransportError, match="not the sender's segment"):
        ReceiverSegment(null.fileno(), nonce="ab" * 16, data_bytes=64)


def test_a_stranger_of_the_right_kind_is_refused_by_its_nonce() -> None:
    ours, other = SenderSegment(64), SenderSegment(64)
    with pytest.raises(TransportError, match="not the sender's segment"):
        ReceiverSegment(other.fd, nonce=ours.nonce, data_bytes=64)


def test_a_write_during_the_load_is_seen() -> None:
    segment = SenderSegment(64)
    version = staged(segment)
    views = version.views()
    next(views)
    segment.begin_write()
    with pytest.raises(TransportError, match="wrote its segment while the engine was reading"):
        version.check_unchanged()
    with pytest.raises(TransportError, match="wrote its segment"):
        list(version.views())


def test_d49_a_flag_that_is_left_from_the_version_before_vouches_for_nothing() -> None:
    """The bytes may be right by chance: they are the last version's. The flag is a number, apart from the data."""
    segment = SenderSegment(64)
    staged(segment)
    coming = segment.generation + 2
    version = HostFdReceiver().open(offer(segment, coming), [segment.fd])
    version.read_bucket(BucketReady(session="s" * 8, first=0, digests=(digest(bytes(range(64))),)))
    with pytest.raises(TransportError, match=rf"observed: generation {coming - 2}; expected: generation {coming}"):
        version.check_unchanged()
    segment.begin_write()  # as it is while the bytes are being written
    with pytest.raises(TransportError, match=rf"observed: generation {coming - 1}; expected: generation {coming}"):
        version.check_unchanged()
    segment.end_write()
    version.check_unchanged()


def test_a_wrong_digest_names_the_tensor_and_nothing_can_be_loaded() -> None:
    segment = SenderSegment(64)
    generation = segment.begin_write()
    segment.end_write()
    version = HostFdReceiver().open(offer(segment, generation), [segment.fd])
    with pytest.raises(DigestMismatch, match="w arrived with another content"):
        version.read_bucket(BucketReady(session="s" * 8, first=0, digests=("0" * 16,)))
    with pytest.raises(ProtocolError, match="was not verified to its end"):
        list(version.views())


def test_a_bucket_out_of_order_or_left_out_is_refused() -> None:
    segment = SenderSegment(64)
    generation = segment.begin_write()
    segment.end_write()
    version = HostFdReceiver().open(offer(segment, generation), [segment.fd])
    with pytest.raises(ProtocolError, match="out of order"):
        version.read_bucket(BucketReady(session="s" * 8, first=1, digests=("0" * 16,)))
    with pytest.raises(ProtocolError, match="ended early"):
        version.finish_staging()


@pytest.mark.parametrize("bad", [{"offset": 64}, {"nbytes": 8}, {"dtype": "object"}])
def test_an_offer_that_lies_maps_nothing(bad: dict[str, object]) -> None:
    segment = SenderSegment(64)
    with pytest.raises(ProtocolError, match="do not fit its segment"):
        HostFdReceiver().open(offer(segment, 2, slot(**bad)), [segment.fd])


def test_a_new_segment_needs_its_descriptor() -> None:
    with pytest.raises(ProtocolError, match="without its descriptor"):
        HostFdReceiver().open(offer(SenderSegment(64), 2), [])


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(4.0).expand(3, 4),
        torch.arange(20.0).view(4, 5)[:, 1:4],
        torch.tensor(3.5),
        torch.empty(0, 7),
        torch.arange(700_001, dtype=torch.float32),
    ],
    ids=["transposed", "expanded", "sliced", "scalar", "empty", "several pieces"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_d05_every_kind_of_tensor_is_written_as_its_contiguous_cast(value: torch.Tensor, dtype: str) -> None:
    wanted = value.contiguous().to(getattr(torch, dtype))
    raw = wanted.reshape(-1).view(torch.uint8).numpy().tobytes()
    segment = SenderSegment(max(len(raw), 1))
    place = TensorSlot(name="w", dtype=dtype, shape=tuple(value.shape), offset=0, nbytes=len(raw))
    found = sender_module._write(segment, place, value)
    assert bytes(segment.data[: len(raw)]) == raw
    assert found == digest(raw)


def test_more_than_the_memory_is_an_error_before_a_byte_is_reserved() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="no room for the weights"):
        SenderSegment(1 << 60)
    assert len(os.listdir("/proc/self/fd")) == before
