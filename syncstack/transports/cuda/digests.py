"""Which digest the CUDA transports use, on both sides."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from syncstack.transports.cuda.driver import Digester, Pending
from syncstack.weights.digest import digest
from syncstack.weights.digest_gpu import DeviceHasher, PendingDigests

WAIT_S = 60.0
"""How long a GPU may take to digest a version, beside everything else that it was asked for."""


class _ByHost:
    """By copying each to the host: right on every device, and as slow as that."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Pending:
        """See Digester."""
        return lambda: [digest(_bytes(tensor)) for tensor in tensors]

    def copy(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> Pending:
        """See Digester."""
        with torch.no_grad():
            for tensor, place in zip(tensors, places, strict=True):
                place.copy_(tensor)
        return self(places)


by_host = _ByHost()


def _bytes(tensor: torch.Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().data


class _ByDevice:
    """By the GPU itself, see ``weights.digest_gpu``."""

    def __init__(self, device: torch.device, wait_s: float) -> None:
        self._hasher = DeviceHasher(device)
        self._wait_s = wait_s

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Pending:
        """See Digester. What it returns raises DeadlineExceeded."""
        return self._pending(self._hasher.start(tensors))

    def copy(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> Pending:
        """See Digester; in one pass."""
        return self._pending(self._hasher.copy(tensors, places))

    def _pending(self, found: PendingDigests) -> Pending:
        return lambda: found.wait(deadline=time.monotonic() + self._wait_s)


def make_digester(device: torch.device, *, wait_s: float = WAIT_S) -> Digester:
    """The digester for tensors of ``device``. One for each sender and each link: it keeps a table of them."""
    return _ByDevice(device, wait_s) if device.type == "cuda" else by_host
