"""Rows of the bug log about values that were cut, fused, freed or forgotten on the way: a sender and a worker's end of
a link, for each transport that needs no GPU and no group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from syncstack.errors import ProtocolError
from syncstack.transports.senders import make_sender
from syncstack.weights.digest import digest
from syncstack.weights.manifest import Wanted
from syncstack.weights.meta import ParamMeta
from syncstack.wire.messages import BucketReady, Piece, Staged, StageEnd
from tests.unit.test_stream import SESSION, offer, send, served, soon

TRANSPORTS = pytest.mark.parametrize("transport", ["host_fd", "stream"])
SIZES = (4096, 1 << 14, 64 << 20)


class Source:
    """Values that exist only while they are iterated over, and memory that is written over as soon as one was given."""

    def __init__(self, values: Mapping[str, torch.Tensor], *, poison: bool = False) -> None:
        self._values = values
        self._poison = poison

    def metadata(self) -> Sequence[ParamMeta]:
        return [ParamMeta(name=name, dtype="float32", shape=tuple(value.shape)) for name, value in self._values.items()]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self._values.items():
            if not self._poison:
                yield name, value
                continue
            given = value.clone()
            yield name, given
            del given
            # What was freed is the next to be given out by the allocator, for something else.
            _ = [torch.full_like(value, float("nan")) for _ in range(4)]


def arrived(transport: str, source: Source, bucket_bytes: int) -> dict[str, torch.Tensor]:
    """What the worker's loader would read."""
    wanted = [Wanted(meta=meta, source=meta.name) for meta in source.metadata()]
    sender = make_sender(transport, bucket_bytes=bucket_bytes)
    with served() as (link, versions, ended):
        sender.stage(source, wanted, [link], session=SESSION, version=1, wait_s=5)
        found = {name: view.clone() for name, view in versions.found[SESSION].views()}
        assert not ended
    sender.close()
    return found


def same(found: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == values.keys() and all(torch.equal(found[name], value) for name, value in values.items())


@TRANSPORTS
def test_d23_the_result_does_not_depend_on_the_size_of_a_bucket(transport: str) -> None:
    """The smallest is one tensor, and cuts what an engine fuses (gate and up) in two."""
    values = {
        f"layer.{n}.{part}": torch.randn(rows, 37)
        for n in range(6)
        for part, rows in (("gate", 29), ("up", 29), ("b", 1))
    }
    for size in SIZES:
        assert same(arrived(transport, Source(values), size), values), size


@TRANSPORTS
def test_d51_three_views_of_one_fused_tensor_arrive_each_as_itself(transport: str) -> None:
    fused = torch.randn(12, 8)
    values = {"q": fused[:4], "k": fused[4:8], "v": fused[8:], "middle": fused[2:10], "across": fused[:, 1:3]}
    for size in SIZES:
        assert same(arrived(transport, Source(values), size), values), size


@TRANSPORTS
@pytest.mark.parametrize("strided", [False, True])
def test_d07_a_value_is_held_until_it_has_arrived(transport: str, strided: bool) -> None:
    values = {f"w{n}": torch.randn(60, 50).t() if strided else torch.randn(60, 50) for n in range(40)}
    for size in SIZES:
        assert same(arrived(transport, Source(values, poison=True), size), values), size


@TRANSPORTS
def test_d10_no_byte_goes_over_the_link_that_the_engine_does_not_need(transport: str) -> None:
    """A float32 trainer and a bfloat16 engine: half the bytes travel, and what was cast is said."""
    values = {f"w{n}": torch.randn(64, 48) for n in range(5)}
    wanted = [
        Wanted(meta=ParamMeta(name=n, dtype="bfloat16", shape=tuple(v.shape)), source=n) for n, v in values.items()
    ]
    total = sum(value.nbytes for value in values.values())
    sender = make_sender(transport, bucket_bytes=4096)
    with served() as (link, versions, _):
        manifest, (staged,) = sender.stage(Source(values), wanted, [link], session=SESSION, version=1, wait_s=5)
        found = {name: view.clone() for name, view in versions.found[SESSION].views()}
    assert (manifest.payload_bytes, sender.cast_bytes) == (total // 2, total)
    assert staged.digests_equal == len(values)
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in values.items())
    sender.close()


def test_d54_a_last_message_without_tensors_ends_a_version_and_one_without_an_end_is_none() -> None:
    ready = BucketReady(session=SESSION, first=0, digests=(digest(bytes(64)),))
    empty = BucketReady(session=SESSION, first=1, digests=())
    with served() as (link, versions, ended):
        send(link, offer(), Piece(session=SESSION, nbytes=64), bytes(64), ready, empty)
        while not versions.found:
            pass
        with pytest.raises(ProtocolError, match="not verified to its end"):
            list(versions.found[SESSION].views())
        send(link, StageEnd(session=SESSION))
        assert isinstance(link.receive(deadline=soon())[0], Staged)
        assert [name for name, _ in versions.found[SESSION].views()] == ["w"]
        assert not ended
