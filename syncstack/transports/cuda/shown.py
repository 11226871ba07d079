"""What of a version is shown as it lies, and what is copied first into memory that can be handed over."""

from __future__ import annotations

from collections import defaultdict

import torch

from syncstack.errors import HandleRefused
from syncstack.transports.cuda.arena import Arena
from syncstack.transports.cuda.driver import Driver, Kind
from syncstack.transports.values import check_shape
from syncstack.weights.manifest import TensorSlot

PENDING_BYTES = 256 << 20
"""Values that wait for one launch that copies them all: what a source has gathered for us is kept alive meanwhile."""


class Shown:
    """The values of one sender's versions, one after the other. Used from one thread at a time."""

    def __init__(self, driver: Driver, kinds: frozenset[Kind], home: str) -> None:
        """``kinds`` is what may be handed out, ``home`` the device for values that lie on the host."""
        self._driver = driver
        self._kinds = kinds
        self._home = home
        self._arena = Arena(driver, kinds)
        self._lying: dict[int, bool] = {}
        self._lay: dict[int, bool] = {}
        """Whether what lies at an address can be shown, and what was known of the version before."""
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pending_bytes = 0
        self._copied = set[str]()

    def begin(self) -> None:
        """Another version."""
        self._lying, self._lay = {}, self._lying
        self._copied.clear()
        self._drop_pending()

    def add(self, slot: TensorSlot, value: torch.Tensor, *, total: int) -> torch.Tensor:
        """The value itself where it can be shown as it lies, else the place that its copy has, or will have after
        ``copy``. ``total`` is the size of the version."""
        check_shape(slot, value)
        if not slot.nbytes:
            return value.detach()
        dtype = getattr(torch, slot.dtype)
        held = self._driver.holds(value)
        lies = held and value.dtype == dtype and value.is_contiguous()
        if lies and self._can_be_shown(value):
            return value.detach()
        device = self._driver.device_of(value) if held else self._home
        self._copied.add(device)
        place = self._arena.place(slot, dtype, device, total=total)
        if lies:
            self._pending.append((place, value.detach()))
            self._pending_bytes += slot.nbytes
            if self._pending_bytes >= PENDING_BYTES:
                self.copy()
        else:
            with torch.no_grad():
                place.copy_(value)
        return place

    def copy(self) -> None:
        """Copy what waits for it, in a launch for each dtype and device and not in one for each tensor: hundreds of
        launches take longer than the bytes. Returns before the device has done it."""
        groups = defaultdict[object, list[tuple[torch.Tensor, torch.Tensor]]](list)
        for place, value in self._pending:
            groups[value.dtype, value.device].append((place, value))
        self._drop_pending()
        with torch.no_grad():
            for pairs in groups.values():
                places, values = zip(*pairs, strict=True)
                torch._foreach_copy_(places, values)

    def settle(self) -> None:
        """Block until every copy is done: a worker reads as soon as it is offered something."""
        for device in self._copied:
            self._driver.settle(device)

    def _drop_pending(self) -> None:
        self._pending, self._pending_bytes = [], 0

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
        self._drop_pending()
        self._lying, self._lay = {}, {}
        self._arena.clear()
