"""What a transport really does on these links, before a refit relies on it: one small bucket, then a measurement.

A trial is a stage like any other, by the transport's own sender, of bytes that no engine loads. So it meets what a
refit would meet: the descriptor's way, the mapping, the digest.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import msgspec
import torch

from syncstack.errors import DeadlineExceeded, ProtocolError, SyncstackError, TransportError
from syncstack.plan import FdWay
from syncstack.threads import in_thread
from syncstack.transports.order import await_done, mark
from syncstack.transports.senders import Sender, make_sender
from syncstack.weights.manifest import Wanted
from syncstack.weights.meta import DTYPE_BYTES, ParamMeta
from syncstack.wire.link import Link

TRIAL_BYTES = 64 << 10
"""Several pages, and over before anybody notices."""

TRIAL_S = 10.0
"""How long a worker may take over it. It is a matter of milliseconds."""

MEASURED_BYTES = 64 << 20
"""More than the caches of common processors hold, so that memory is measured and not a cache."""

ROUNDS = 3
"""Times that a version is moved again; the fastest counts, because a machine's noise only ever slows it."""


REFUSALS = (TransportError, ProtocolError, DeadlineExceeded)
"""What says that a transport does not serve a link. A worker that goes away says nothing of it."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How the trial of one link ended; ``cause`` is empty where the bucket arrived and its digest was right."""

    link: str
    cause: str = ""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second over all links together: of the first version, which reserves and maps, and of later ones."""

    first: float
    again: float


class Trials:
    """Trials over the links of one plan. Blocks; called by the thread that owns the links."""

    def __init__(
        self,
        transport: str,
        links: Mapping[str, tuple[Link, FdWay]],
        *,
        bucket_bytes: int,
        gpu: str = "",
        device: torch.device | None = None,
    ) -> None:
        """``gpu`` is the UUID of the GPU that holds the weights, ``device`` torch's name for where they lie: what is
        tried lies there too."""
        self._transport = transport
        self._gpu = gpu
        self._device = device or torch.device("cpu")
        self._links = links
        self._bucket_bytes = bucket_bytes

    def run(self, wait_s: float) -> list[Ended]:
        """Try every link at the same time and return how each ended, in order; no link waits for another.

        Raises LinkLost when a worker went away: that says nothing of the transport.
        """
        futures = {name: in_thread(partial(self._one, name, wait_s), "syncstack-trial") for name in self._links}
        return [_ended(name, future) for name, future in futures.items()]

    def _one(self, name: str, wait_s: float) -> None:
        link, way = self._links[name]
        content = torch.frombuffer(bytearray(os.urandom(TRIAL_BYTES)), dtype=torch.uint8)
        bucket = {"syncstack.trial": content.to(self._device)}
        await_done(mark(), wait_s=wait_s)
        sender = self._sender()
        try:
            sender.stage(
                _Given(bucket),
                _Given(bucket).wanted(),
                [link],
                session=secrets.token_hex(16),
                version=0,
                wait_s=wait_s,
                fd_ways={link: way} if way else {},
            )
        finally:
            sender.close()

    def _sender(self) -> Sender:
        return make_sender(self._transport, bucket_bytes=self._bucket_bytes, device=self._gpu)

    def measure(self, wanted: Sequence[Wanted], wait_s: float) -> Rate:
        """Move tensors like the first of ``wanted`` to all links, as a refit does, and time it.

        The real shapes, because a model of many small tensors moves slower than one tensor of the same size.
        """
        source = _Given({meta.name: _like(meta, self._device) for meta in _first(wanted, MEASURED_BYTES)})
        await_done(mark(), wait_s=wait_s)
        num_bytes = sum(want.meta.nbytes for want in source.wanted())
        links = [link for link, _ in self._links.values()]
        sender = self._sender()
        seconds = []
        try:
            for _ in range(1 + ROUNDS):
                begin = time.perf_counter()
                sender.stage(
                    source,
                    source.wanted(),
                    links,
                    session=secrets.token_hex(16),
                    version=0,
                    wait_s=wait_s,
                    fd_ways={link: way for link, way in self._links.values() if way},
                )
                seconds.append(time.perf_counter() - begin)
        finally:
            sender.close()
        return Rate(first=num_bytes / seconds[0], again=num_bytes / min(seconds[1:]))


def _ended(name: str, future: Future[None]) -> Ended:
    try:
        future.result()
    except REFUSALS as error:
        return Ended(link=name, cause=short(error))
    return Ended(link=name)


def short(error: SyncstackError) -> str:
    """What happened and what was seen; what follows from it is the plan's to say."""
    return str(SyncstackError(error.what, observed=error.observed, expected=error.expected))


class _Given:
    """A weight source of tensors that are at hand."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def metadata(self) -> Sequence[ParamMeta]:
        return [
            ParamMeta(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        ]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    def wanted(self) -> tuple[Wanted, ...]:
        return tuple(Wanted(meta=meta, source=meta.name) for meta in self.metadata())


def _first(wanted: Sequence[Wanted], most: int) -> Iterator[ParamMeta]:
    """The first tensors of ``wanted``, ``most`` bytes together; the last one is cut to what is left."""
    left = most
    for want in wanted:
        meta = want.meta
        if meta.nbytes > left:
            meta = msgspec.structs.replace(meta, shape=(left // DTYPE_BYTES[meta.dtype],))
        left -= meta.nbytes
        yield meta
        if left <= 0:
            return


def _like(meta: ParamMeta, device: torch.device) -> torch.Tensor:
    """A tensor of its shape and dtype, in pages of its own: untouched ones would all be the same page of zeros."""
    return (
        torch.full((math.prod(meta.shape) * DTYPE_BYTES[meta.dtype],), 1, dtype=torch.uint8, device=device)
        .view(getattr(torch, meta.dtype))
        .view(meta.shape)
    )
