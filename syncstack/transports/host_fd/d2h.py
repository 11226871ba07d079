"""Weights of a GPU on their way into the segment: digested where they lie, and copied without anybody waiting.

The copies of one bucket follow those of the last on a stream of their own, so that the bus is never idle; the digests
are made beside them, at the speed of the GPU's memory. Of several GPUs each has its streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from syncstack.errors import DeadlineExceeded
from syncstack.events import await_event
from syncstack.transports.values import check_shape
from syncstack.weights.digest_gpu import DeviceHasher, PendingDigests
from syncstack.weights.manifest import TensorSlot

Values = Sequence[tuple[TensorSlot, torch.Tensor]]
Write = Callable[[TensorSlot, torch.Tensor], str]
"""Puts a value of the host into its place and digests it."""

Place = Callable[[TensorSlot], torch.Tensor]
"""The host memory, page-locked if it can be, of a tensor's dtype and shape, that its values go to."""


STEP_BYTES = 64 << 20
"""What is copied of a large tensor before a reader is told. An embedding is the first tensor of most models, and a
tenth of some."""


class _Device:
    """What one GPU needs for it."""

    def __init__(self, device: torch.device) -> None:
        self.hasher = DeviceHasher(device)
        with torch.cuda.device(device):
            self.copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]


class LeavingBucket:
    """One bucket on its way. Holds its values and their places until ``wait`` is over."""

    def __init__(self, values: Values) -> None:
        self._slots = [slot for slot, _ in values]
        self._digests = dict[int, str]()
        self._pending = list[tuple[list[int], PendingDigests, torch.cuda.Event]]()
        self._held = list[torch.Tensor]()
        self._steps = list[tuple[int, torch.cuda.Event]]()

    def add(self, number: int, digest: str) -> None:
        """One that is there already."""
        self._digests[number] = digest

    def start(
        self, device: _Device, numbers: list[int], values: list[torch.Tensor], places: list[torch.Tensor]
    ) -> None:
        """Those of one GPU; ``values`` are as they shall travel."""
        with torch.cuda.device(values[0].device):
            device.copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(device.copies):
                for number, value, place in zip(numbers, values, places, strict=True):
                    self._copy(self._slots[number].offset, value.view(-1), place.view(-1))
                done = _recorded()
            self._pending.append((numbers, device.hasher.start(values), done))
        self._held += [*values, *places]

    def _copy(self, offset: int, value: torch.Tensor, place: torch.Tensor) -> None:
        """One tensor, flat; a large one in steps, so that a reader need not wait for its end."""
        numel = STEP_BYTES // value.element_size()
        for low in range(0, len(value), numel):
            part = place[low : low + numel]
            part.copy_(value[low : low + numel], non_blocking=True)
            if len(value) > numel:
                self._steps.append((offset + low * value.element_size() + part.nbytes, _recorded()))

    def steps(self, *, deadline: float) -> Iterator[int]:
        """As large tensors come: how many bytes of the data area, from its beginning, are there once the buckets before
        this one are. Nothing where the bucket is of several GPUs, whose copies come in no order. Raises
        DeadlineExceeded."""
        if len(self._pending) > 1:
            return
        for readable, done in self._steps:
            await_event(done, deadline=deadline, late=self._late)
            yield readable

    def wait(self, *, deadline: float) -> list[tuple[TensorSlot, str]]:
        """Every slot with its digest, once all bytes are there. Raises DeadlineExceeded."""
        for numbers, digests, done in self._pending:
            self._digests |= dict(zip(numbers, digests.wait(deadline=deadline), strict=True))
            await_event(done, deadline=deadline, late=self._late)
        self._held.clear()
        return [(slot, self._digests[number]) for number, slot in enumerate(self._slots)]

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            "the GPU did not copy a bucket of weights into host memory in time",
            observed=f"{sum(slot.nbytes for slot in self._slots)} bytes",
            consequence="The version was given up",
        )


class LeavingGpu:
    """The trainer's half. Used from one thread at a time."""

    def __init__(self) -> None:
        self._devices = dict[torch.device, _Device]()

    def start(self, values: Values, place: Place, write: Write) -> LeavingBucket:
        """Start on one bucket, and return at once but for values that lie on the host: ``write`` is called for them."""
        bucket = LeavingBucket(values)
        groups = dict[torch.device, list[int]]()
        for number, (slot, value) in enumerate(values):
            check_shape(slot, value)
            if value.device.type == "cuda" and slot.nbytes:
                groups.setdefault(value.device, []).append(number)
            else:
                bucket.add(number, write(slot, value))
        for device, numbers in groups.items():
            if device not in self._devices:
                self._devices[device] = _Device(device)
            slots = [values[number][0] for number in numbers]
            travelling = [_as_it_travels(slot, values[number][1]) for slot, number in zip(slots, numbers, strict=True)]
            bucket.start(self._devices[device], numbers, travelling, [place(slot) for slot in slots])
        return bucket

    def settle(self) -> None:
        """Block until nothing is copied any more: the places may be unmapped then."""
        for device in self._devices.values():
            device.copies.synchronize()


def _recorded() -> torch.cuda.Event:
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return done


def _as_it_travels(slot: TensorSlot, value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(getattr(torch, slot.dtype)).contiguous()
