"""The trainer's half of ``cuda_fd`` and ``cuda_ipc``: show every worker where the weights lie, and tell their digests.

Not a byte is copied: the workers map the trainer's own parameters and read them in place. What has been shown is shown
once; a refit that finds everything where it was is one offer, one digest on each side and one answer. A value whose
memory cannot be handed over that way (plain cudaMalloc memory for ``cuda_fd``), or that does not lie on the GPU in the
dtype that travels (cast, strided, on the host), is copied once into memory that can: see ``shown``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from msgspec.structs import replace

from syncstack.transports.answers import collect_answers
from syncstack.transports.cuda.digests import make_digester
from syncstack.transports.cuda.driver import Digester, Driver, Kind, load_driver
from syncstack.transports.cuda.handover import Given, handle_for
from syncstack.transports.cuda.shown import Shown
from syncstack.transports.cuda.table import OwnSegment, OwnTable
from syncstack.transports.host_fd.handover import FdWay, default_way
from syncstack.transports.values import ValueReader
from syncstack.weights.manifest import WHOLE, Manifest, Share, Wanted, layout
from syncstack.weights.source import WeightSource, stays
from syncstack.wire.link import Link
from syncstack.wire.messages import BucketReady, Offer, Staged, StageEnd, Table

BY_FD: frozenset[Kind] = frozenset({"fd"})
"""What ``cuda_fd`` hands out: descriptors, which every namespace takes."""

BY_IPC: frozenset[Kind] = frozenset({"ipc"})
"""What ``cuda_ipc`` hands out: legacy handles."""

Known = WeakKeyDictionary[Link, Table]
"""What each worker was told last."""


class CudaSender:
    """One per trainer rank. Called by the coordinator, from one thread; blocks until every worker has verified.

    The weights belong to the workers from here until the refit is over: whoever writes them meanwhile is found out by
    the digests that are taken again after the load.
    """

    unpinned = ""
    """See Sender. No byte goes through the host's memory."""

    def __init__(
        self,
        kinds: frozenset[Kind],
        home: str,
        *,
        driver: Callable[[], Driver] = load_driver,
        digester: Callable[[torch.device], Digester] = make_digester,
    ) -> None:
        """``home`` is the device for values that lie on the host. Raises TransportError where there is no driver."""
        self._kinds = kinds
        self._driver = driver()
        self._make_digester = digester
        self._digester: Digester | None = None
        self._reader = ValueReader(bucket_bytes=0)
        self._table = OwnTable(self._driver, kinds)
        self._known: Known = WeakKeyDictionary()
        self._values: list[torch.Tensor] = []
        self._shown = Shown(self._driver, kinds, home, digester)
        self._laid: tuple[Sequence[Wanted], Manifest] | None = None

    @property
    def cast_bytes(self) -> int:
        """See Sender."""
        return self._reader.cast_bytes

    def stage(
        self,
        source: WeightSource,
        wanted: Sequence[Wanted],
        links: Sequence[Link],
        *,
        session: str,
        version: int,
        wait_s: float,
        fd_ways: Mapping[Link, FdWay] | None = None,
        share: Share = WHOLE,
    ) -> tuple[Manifest, list[Staged]]:
        """Show one version to every link's worker and wait until each has verified it.

        Tensors are kept until the next version, because memory that is being read may not be given to anybody else.
        After a failure everything is shown anew. Raises DigestMismatch, HandleRefused, TransportError, LinkLost or
        DeadlineExceeded.
        """
        self._reader.await_idle(wait_s)
        manifest = self._layout(wanted, share)
        stop = threading.Event()
        ways = {link: (fd_ways or {}).get(link) or default_way(link) for link in links}
        given = Given(ways, session=session, wait_s=wait_s)

        table, known, values = self._table, self._known, list[torch.Tensor]()

        def send() -> None:
            pairs = self._reader.values(source, wanted, manifest, stop)
            values.extend(self._shown.show(pairs, manifest, stay=stays(source)))
            pending = self._digests(values)  # while everything else is looked at
            offer = self._offer(table, values, manifest, session, version)
            _show(offer, table, known, given, ways, wait_s)
            _tell(links, pending(), session, wait_s)

        try:
            filling = self._reader.start(send)
            num = len(manifest.tensors)
            staged = collect_answers(links, filling, session=session, num_tensors=num, wait_s=wait_s)
        except BaseException:
            stop.set()
            self._forget()
            self._reader.release(partial(_end, table, given))  # not before its thread has ended
            raise
        finally:
            given.close()
        self._values = values
        return manifest, staged

    def _layout(self, wanted: Sequence[Wanted], share: Share) -> Manifest:
        """The last version's where it is the same, which it is as long as nobody changes a model."""
        if self._laid is None or self._laid[0] != wanted or self._laid[1].share != share:
            self._laid = wanted, layout(wanted, share)
        return self._laid[1]

    def _offer(
        self, table: OwnTable, values: Sequence[torch.Tensor], manifest: Manifest, session: str, version: int
    ) -> Offer:
        """Find out where the values lie now, and say so in ``table``; how it is handed over is left open."""
        lying = [value for value in values if value.nbytes]
        if lying:
            self._driver.bind(self._driver.device_of(lying[0]))
        table.update(values)
        self._shown.settle()
        return Offer(
            session=session,
            version=version,
            segment=table.nonce,
            segment_bytes=manifest.total_bytes,
            generation=table.generation,
            tensors=manifest.tensors,
            share=manifest.share,
        )

    def _digests(self, values: Sequence[torch.Tensor]) -> Callable[[], tuple[str, ...]]:
        """Start on the digests that the copies have not begun; values that share their bytes share their digest."""
        copied = [place for places, _ in self._shown.digests for place in places]
        known = {_extent(place) for place in copied}
        rest = list({_extent(value): value for value in values if _extent(value) not in known}.values())
        pending = [found for _, found in self._shown.digests]
        if rest:
            if self._digester is None:
                self._digester = self._make_digester(rest[0].device)
            pending.append(self._digester(rest))

        def wait() -> tuple[str, ...]:
            found = [one for some in pending for one in some()]
            by_extent = dict(zip(map(_extent, [*copied, *rest]), found, strict=True))
            return tuple(by_extent[_extent(value)] for value in values)

        return wait

    def retire(self) -> None:
        """Forget what was shown: the next version is shown anew, and a worker that still reads is found out by its
        digests. Memory that it has mapped stays mapped there, and only there."""
        table = self._table
        self._forget()
        table.clear()

    def _forget(self) -> None:
        self._table = OwnTable(self._driver, self._kinds)
        self._known = WeakKeyDictionary()
        self._values = []
        self._shown.clear()

    def close(self) -> None:
        """Let all memory go."""
        self.retire()
        self._reader.close()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _show(offer: Offer, own: OwnTable, known: Known, given: Given, ways: Mapping[Link, FdWay], wait_s: float) -> None:
    """Offer the version, and hand over what each worker has not seen yet."""
    table = Table(
        session=offer.session,
        generation=own.generation,
        segments=tuple(segment.told for segment in own.segments),
        places=own.places,
    )
    lacking = {segment: _lacking(segment, ways, known) for segment in own.segments}
    given.check(lacking)
    for link, way in ways.items():
        link.send(replace(offer, handle=handle_for(way)), deadline=time.monotonic() + wait_s)
        last = known.get(link)
        if last is None or last.generation != table.generation:
            link.send(table, deadline=time.monotonic() + wait_s)
    for segment, links in lacking.items():
        if links:
            given.give(segment, links)
    for link in ways:
        known[link] = table


def _lacking(segment: OwnSegment, links: Iterable[Link], known: Known) -> list[Link]:
    """The links whose workers have not got a segment."""
    last = {link: known.get(link) for link in links}
    return [link for link, table in last.items() if table is None or segment.told not in table.segments]


def _tell(links: Sequence[Link], digests: tuple[str, ...], session: str, wait_s: float) -> None:
    """Say what the workers must find."""
    for link in links:
        if digests:
            link.send(BucketReady(session=session, first=0, digests=digests), deadline=time.monotonic() + wait_s)
        link.send(StageEnd(session=session), deadline=time.monotonic() + wait_s)


def _end(table: OwnTable, given: Given) -> None:
    """Let go of what a version that was given up has held."""
    given.close()
    table.clear()
