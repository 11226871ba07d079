"""What of a version is shown as it lies, and what is copied first into memory that can be handed over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from syncstack.errors import HandleRefused
from syncstack.transports.cuda.arena import Arena
from syncstack.transports.cuda.driver import Digester, Driver, Kind, Pending
from syncstack.transports.values import check_shape
from syncstack.weights.manifest import Manifest, TensorSlot

PENDING_BYTES = 256 << 20
"""Values that wait for one launch that copies them all: what a source has gathered for us is kept alive meanwhile."""


Pair = tuple[TensorSlot, torch.Tensor]
Lay = list[tuple[int, torch.dtype, torch.Size, bool]]
"""Where and how the values of a version lay. Two that lie in the same way are shown in the same way."""


@dataclass(frozen=True)
class _Version:
    manifest: Manifest
    lay: Lay
    shown: list[torch.Tensor]
    copied: list[int]
    cast: list[int]
    """Which of ``shown`` are places of copies: as the value lay, or in another dtype or order."""


class Shown:
    """The values of one sender's versions, one after the other. Used from one thread at a time."""

    def __init__(
        self, driver: Driver, kinds: frozenset[Kind], home: str, digester: Callable[[torch.device], Digester]
    ) -> None:
        """``kinds`` is what may be handed out, ``home`` the device for values that lie on the host."""
        self._driver = driver
        self._kinds = kinds
        self._home = home
        self._arena = Arena(driver, kinds)
        self._lying: dict[int, bool] = {}
        self._lay: dict[int, bool] = {}
        """Whether what lies at an address can be shown, and what was known of the version before."""
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied: list[int] = []
        self._cast: list[int] = []
        self._devices = set[str]()
        """The devices that hold copies."""
        self._make_digester = digester
        self._digesters = defaultdict[torch.device, list[Digester]](list)
        """One for each of a version's launches: the next version's has mostly the same tensors and places."""
        self._last: _Version | None = None
        self.digests: list[tuple[tuple[torch.Tensor, ...], Pending]] = []
        """Places of this version that were filled together, and the digests of what they hold."""

    def show(self, pairs: Iterable[Pair], manifest: Manifest, *, stay: bool) -> list[torch.Tensor]:
        """For each slot of a version the value itself where it can be shown as it lies, else its copy, which the device
        may not have made yet (see ``settle``).

        ``stay``: all values may be held at once. They are copied by one launch then, and a version that lies as the
        last one did is not looked at tensor by tensor; else what waits for its copy is limited. Raises GpuError,
        HandleRefused or TransportError.
        """
        self.digests, self._pending = [], []
        if not stay:
            self._last = None
            return self._looked_at(pairs, manifest, most=PENDING_BYTES)
        pairs = list(pairs)
        lay = [(value.data_ptr(), value.dtype, value.shape, value.is_contiguous()) for _, value in pairs]
        last = self._last
        if last is not None and last.manifest is manifest and last.lay == lay:
            self._again(last, pairs)
            return last.shown
        self._last = None
        shown = self._looked_at(pairs, manifest, most=manifest.total_bytes)
        self._last = _Version(manifest, lay, shown, self._copied, self._cast)
        return shown

    def _again(self, last: _Version, pairs: list[Pair]) -> None:
        with torch.no_grad():
            for index in last.cast:
                last.shown[index].copy_(pairs[index][1])
        self._pending = [(last.shown[index], pairs[index][1].detach()) for index in last.copied]
        self._copy()

    def _looked_at(self, pairs: Iterable[Pair], manifest: Manifest, *, most: int) -> list[torch.Tensor]:
        self._lying, self._lay = {}, self._lying
        self._devices.clear()
        self._copied, self._cast = [], []
        shown, waiting = list[torch.Tensor](), 0
        for index, (slot, value) in enumerate(pairs):
            shown.append(self._one(index, slot, value, total=manifest.total_bytes))
            waiting += slot.nbytes if self._copied[-1:] == [index] else 0
            if waiting >= most:
                self._copy()
                waiting = 0
        self._copy()
        return shown

    def _one(self, index: int, slot: TensorSlot, value: torch.Tensor, *, total: int) -> torch.Tensor:
        check_shape(slot, value)
        if not slot.nbytes:
            return value.detach()
        dtype = getattr(torch, slot.dtype)
        held = self._driver.holds(value)
        lies = held and value.dtype == dtype and value.is_contiguous()
        if lies and self._can_be_shown(value):
            return value.detach()
        device = self._driver.device_of(value) if held else self._home
        self._devices.add(device)
        place = self._arena.place(slot, dtype, device, total=total)
        if lies:
            self._pending.append((place, value.detach()))
            self._copied.append(index)
        else:
            with torch.no_grad():
                place.copy_(value)
            self._cast.append(index)
        return place

    def _copy(self) -> None:
        """Copy and digest what waits for it, in one pass and one launch for each device and not for each tensor:
        hundreds of launches take longer than the bytes. Returns before the device has done it."""
        groups = defaultdict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]](list)
        for place, value in self._pending:
            groups[value.device].append((place, value))
        self._pending = []
        for device, pairs in groups.items():
            places, values = zip(*pairs, strict=True)
            self.digests.append((places, self._digester(device).copy(values, places)))

    def _digester(self, device: torch.device) -> Digester:
        digesters, number = self._digesters[device], sum(places[0].device == device for places, _ in self.digests)
        if number == len(digesters):
            digesters.append(self._make_digester(device))
        return digesters[number]

    def settle(self) -> None:
        """Block until every copy is done: a worker reads as soon as it is offered something."""
        for device in self._devices:
            self._driver.settle(device)

    def _can_be_shown(self, value: torch.Tensor) -> bool:
        """Whether its memory is of a kind that is handed out. Known by address: what lies there is looked at before it
        is shown, so an old answer is found out."""
        address = value.data_ptr()
        found = self._lying.get(address, self._lay.get(address))
        if found is None:
            self._driver.bind(self._driver.device_of(value))
            try:
                found = self._driver.kind(address) in self._kinds
            except HandleRefused:
                found = False
        self._lying[address] = found
        return found

    def clear(self) -> None:
        """Forget everything; the memory of copies goes with the last tensor of it."""
        self._lying, self._lay, self._last = {}, {}, None
        self._pending, self.digests = [], []
        self._digesters.clear()
        self._arena.clear()
