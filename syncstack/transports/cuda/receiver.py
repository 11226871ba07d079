"""The worker's half of ``cuda_fd`` and ``cuda_ipc``: map the sender's GPU memory read-only, digest what it holds, hand
out views.

Nothing is copied: the engine's loader reads the trainer's own parameters. A mapping stays from one refit to the next,
by the sender's nonce and the number that it gave the memory; both are used once. Addresses, process numbers and the
bytes of handles repeat, and name nothing.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakSet

import torch

from syncstack.errors import LinkLost, ProtocolError
from syncstack.transports.cuda.checks import check_places, check_table
from syncstack.transports.cuda.digests import make_digester
from syncstack.transports.cuda.driver import Digester, Driver, load_driver
from syncstack.transports.cuda.handover import taken
from syncstack.transports.cuda.mapping import Mapping, PendingSegment, open_ipc
from syncstack.transports.cuda.room import check_descriptors
from syncstack.transports.staged import StagedVersion, check_offer
from syncstack.weights.manifest import TensorSlot
from syncstack.wire.messages import MAX_CHUNK_FDS, BucketReady, Chunks, Offer, Place, Table


class Views:
    """A version's tensors in the sender's memory."""

    def __init__(self, tensors: tuple[TensorSlot, ...], mappings: Sequence[Mapping], places: Sequence[Place]) -> None:
        flat = [mapping.data for mapping in mappings]
        self.tensors = tensors
        self.by_name: dict[str, torch.Tensor] = {}
        for slot, place in zip(tensors, places, strict=True):
            dtype = getattr(torch, slot.dtype)
            if slot.nbytes == 0:
                self.by_name[slot.name] = torch.empty(slot.shape, dtype=dtype, device=flat[0].device if flat else None)
                continue
            part = flat[place.segment][place.offset : place.offset + slot.nbytes]
            self.by_name[slot.name] = part.view(dtype).view(slot.shape)
        lying = {name: (view.data_ptr(), view.nbytes) for name, view in self.by_name.items()}
        self.distinct = tuple({lying[name]: view for name, view in self.by_name.items()}.values())
        """Each run of bytes once, whatever its names are."""
        numbers = {place: number for number, place in enumerate(dict.fromkeys(lying.values()))}
        self.numbers = {name: numbers[place] for name, place in lying.items()}
        """Which of ``distinct`` a name is."""


class CudaReceiver:
    """The memory of one link. Called from that link's thread only."""

    def __init__(
        self,
        driver: Callable[[], Driver] = load_driver,
        digester: Callable[[torch.device], Digester] = make_digester,
    ) -> None:
        self._load = driver
        self._make_digester = digester
        self._driver: Driver | None = None
        self._digester: tuple[torch.device, Digester] | None = None
        self._sender = ""
        self._tensors: tuple[TensorSlot, ...] = ()
        self._table: Table | None = None
        self._mapped: dict[int, Mapping] = {}
        self._views: Views | None = None
        self._closing = threading.Lock()
        """Held while it unmaps, so that the process's end can wait for a link's thread that does."""
        self._pending: dict[int, PendingSegment] = {}

    @property
    def driver(self) -> Driver:
        """The driver. Raises TransportError where there is none."""
        if self._driver is None:
            self._driver = self._load()
            _close_at_exit(self)
        return self._driver

    def open(self, offer: Offer) -> CudaVersion:
        """Accept an offer. Raises TransportError or ProtocolError; what is mapped stays until the next table."""
        if offer.tensors != self._tensors:
            check_offer(offer)
            self._tensors = ()
        if offer.segment != self._sender:
            self.close()
            self._sender = offer.segment
        self.give_up()
        version = CudaVersion(offer, self)
        if self._table is not None and self._table.generation == offer.generation:
            self._bind(self._table)
            check_places(self._table, offer.tensors)
            version.begin()
        self._tensors = offer.tensors
        return version

    def _bind(self, table: Table) -> None:
        """The link's thread may be another than the one that mapped it."""
        for device in {segment.device for segment in table.segments}:
            self.driver.bind(device)

    def accept(self, table: Table, offer: Offer) -> None:
        """Take a new table: check it, give up what it leaves out, map what needs no descriptor. Raises ProtocolError,
        TransportError, HandleRefused or GpuError; nothing of it is used then."""
        if table.generation != offer.generation or (
            self._table is not None and table.generation <= self._table.generation
        ):
            raise ProtocolError("a table of another generation", observed=str(table.generation))
        check_table(table, offer.tensors)
        new = [segment for segment in table.segments if segment.id not in self._mapped]
        for segment in table.segments:
            if segment.id in self._mapped and self._mapped[segment.id].segment != segment:
                raise ProtocolError("a segment was described in another way than before", observed=str(segment.id))
        most = max((len(segment.chunks) for segment in new if not segment.ipc), default=0)
        check_descriptors(min(most, MAX_CHUNK_FDS), side="engine")
        self._bind(table)
        self._table = self._views = None
        kept = {segment.id for segment in table.segments}
        for number in [number for number in self._mapped if number not in kept]:
            self._mapped.pop(number).close()
        for segment in new:
            if segment.ipc:
                self._mapped[segment.id] = open_ipc(self.driver, segment)
            else:
                self._pending[segment.id] = PendingSegment(self.driver, segment)
        self._table = table

    def take(self, chunks: Chunks, offer: Offer, fds: Sequence[int]) -> None:
        """Import one batch, and map its segment when it is complete. Raises as ``accept``."""
        pending = self._pending.get(chunks.segment)
        if pending is None or pending.come != chunks.first:
            raise ProtocolError(
                "descriptors out of order",
                observed=f"segment {chunks.segment} from chunk {chunks.first}",
                expected="a segment that is new" if pending is None else f"from chunk {pending.come}",
            )
        whole = len(pending.segment.chunks)
        if chunks.first + chunks.count > whole:
            raise ProtocolError(
                "more descriptors than chunks", observed=str(chunks.first + chunks.count), expected=f"<= {whole}"
            )
        for fd in taken(offer.handle, chunks, fds):
            pending.add(fd)
        if pending.come == whole:
            self._mapped[chunks.segment] = pending.map()
            del self._pending[chunks.segment]

    def holds(self, generation: int) -> bool:
        """Whether everything of a table is mapped."""
        return self._table is not None and self._table.generation == generation and not self._pending

    def views(self, tensors: tuple[TensorSlot, ...]) -> Views:
        """The table's tensors. Made once for a table: for hundreds that takes as long as their digests."""
        assert self._table is not None
        if self._views is None or self._views.tensors != tensors:
            mappings = [self._mapped[segment.id] for segment in self._table.segments]
            self._views = Views(tensors, mappings, self._table.places)
        return self._views

    def settle(self) -> None:
        """Block until the devices have done everything that this process has asked of them."""
        for device in {mapping.segment.device for mapping in self._mapped.values()}:
            self.driver.settle(device)

    def digester(self, device: torch.device) -> Digester:
        """The digester of a device, the same as long as it is the same device."""
        if self._digester is None or self._digester[0] != device:
            self._digester = (device, self._make_digester(device))
        return self._digester[1]

    def give_up(self) -> None:
        """Give back what has come of segments that are not mapped yet: whoever ends in the middle of a table begins it
        anew."""
        if self._pending:
            for pending in self._pending.values():
                pending.drop()
            self._pending = {}
            self._table = None

    def close(self) -> None:
        """Unmap everything; what a loader still holds stays readable until it is dropped."""
        self.give_up()
        with self._closing:
            self._views = None
            while self._mapped:
                self._mapped.popitem()[1].close()
            self._table, self._sender, self._tensors = None, "", ()


_OPEN: WeakSet[CudaReceiver] = WeakSet()


def _close_at_exit(receiver: CudaReceiver) -> None:
    """A mapping that is alive when the interpreter is gone would be ended by torch's destructors, which then call into
    an interpreter that is not there: the process would abort instead of ending."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _OPEN.add(receiver)


def _close_all() -> None:
    for receiver in list(_OPEN):
        receiver.close()


class _Lent:
    """A version's memory as StagedVersion asks for it. The sender's generation cannot be read from here: what is
    digested again after the load tells whether it wrote."""

    data = memoryview(b"")

    def __init__(self, generation: int) -> None:
        self.generation = generation


class CudaVersion(StagedVersion):
    """A version that lies in the sender's GPU memory."""

    def __init__(self, offer: Offer, receiver: CudaReceiver) -> None:
        super().__init__(offer, _Lent(offer.generation), 0.0)
        self._receiver = receiver
        self._views: Views | None = None
        self._found: Callable[[], dict[str, str]] | None = None
        self._known: dict[str, str] | None = None

    def hand_over(self, message: Table | Chunks, fds: Sequence[int]) -> None:
        """See StagedVersion."""
        begin = time.perf_counter()
        try:
            if isinstance(message, Table):
                self._receiver.accept(message, self.offer)
            else:
                self._receiver.take(message, self.offer, fds)
        except BaseException:
            self._receiver.give_up()
            raise
        self._map_s += time.perf_counter() - begin

    def read_bucket(self, bucket: BucketReady) -> None:
        """See StagedVersion."""
        if self._found is None:
            if not self._receiver.holds(self.offer.generation):
                raise ProtocolError("tensors were announced before the memory that holds them")
            self.begin()
        super().read_bucket(bucket)

    def begin(self) -> None:
        """Everything is mapped: make the views, and start on their digests."""
        self._views = self._receiver.views(self.offer.tensors)
        self._found = self._begun()

    def _begun(self) -> Callable[[], dict[str, str]]:
        """Start on the digests of all tensors, by name; names that share their bytes share their digest."""
        views = self._views
        if views is None or not views.distinct:
            return dict
        pending = self._receiver.digester(views.distinct[0].device)(views.distinct)

        def wait() -> dict[str, str]:
            found = pending()
            return {name: found[number] for name, number in views.numbers.items()}

        return wait

    def _digested(self, slots: Sequence[TensorSlot]) -> Iterable[str]:
        """See StagedVersion."""
        if self._known is None:
            assert self._found is not None
            self._known = self._found()
        return [self._known[slot.name] for slot in slots]

    def check_again(self) -> None:
        """See StagedVersion. What the loader has asked the device to do is done first: the trainer may write its
        parameters as soon as this has been answered."""
        self._receiver.settle()
        self._known, self._found = None, self._begun()
        super().check_again()

    def _view(self, slot: TensorSlot) -> torch.Tensor:
        if self._views is None:
            raise LinkLost("this version's memory was given back")
        return self._views.by_name[slot.name]

    def close(self) -> None:
        """See StagedVersion. Its memory stays mapped for the next version."""
        super().close()
        self._views = self._found = None
