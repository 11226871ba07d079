"""What a worker received can be sent on (bug-log row A25): as a copy in a segment of the next sender's own, never as
the first owner's descriptor. CUDA IPC memory cannot be exported again (sgl-project/sglang#8382)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from syncstack.transports.endpoint import WorkerEndpoint
from syncstack.transports.host_fd.sender import HostFdSender
from syncstack.transports.staged import StagedVersion
from syncstack.weights.manifest import resolve
from syncstack.weights.meta import ParamMeta
from syncstack.weights.source import ModuleSource, WeightSource
from syncstack.wire import unix
from syncstack.wire.link import Link, greet

SHAPES = ((300, 70), (5,), (0, 3), (1 << 18,))


class Received:
    """A version in a worker as the next sender's weight source."""

    def __init__(self, version: StagedVersion) -> None:
        self._version = version

    def metadata(self) -> Sequence[ParamMeta]:
        slots = self._version.offer.tensors
        return [ParamMeta(name=slot.name, dtype=slot.dtype, shape=slot.shape) for slot in slots]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._version.views()


def send(source: WeightSource, sender: HostFdSender, endpoint: WorkerEndpoint) -> tuple[StagedVersion, Link]:
    assert endpoint.path is not None
    link = Link(unix.connect(endpoint.path, deadline=time.monotonic() + 5))
    greet(link, role="trainer", rank=0, deadline=time.monotonic() + 5)
    metas = source.metadata()
    sender.stage(source, resolve(metas, metas, {}), [link], session="session-1", version=1, wait_s=10)
    return endpoint.take("session-1"), link


def test_a25_what_was_received_can_be_sent_on_as_a_copy(tmp_path: Path) -> None:
    module = torch.nn.ParameterList([torch.randn(shape) for shape in SHAPES])
    endpoints = [WorkerEndpoint(tmp_path / name, rank=0, link_s=10) for name in ("b", "c")]
    senders = [HostFdSender(bucket_bytes=4096) for _ in endpoints]
    at_b, to_b = send(ModuleSource(module), senders[0], endpoints[0])
    at_c, to_c = send(Received(at_b), senders[1], endpoints[1])
    assert at_c.offer.segment != at_b.offer.segment
    to_b.close()  # the first owner may go
    senders[0].close()
    found = dict(at_c.views())
    assert found.keys() == {"0", "1", "2", "3"}
    for name, parameter in module.named_parameters():
        assert torch.equal(found[name], parameter)
    at_c.check_again()
    del found
    for thing in (to_c, senders[1], *endpoints):
        thing.close()
