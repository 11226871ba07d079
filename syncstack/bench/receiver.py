"""The process that the benchmark's versions go to: a worker's endpoint without an engine, and what others' ways need.

It is the benchmark's own child, and the pipe between them is theirs alone: that torch's sharing and "pickle and a pipe"
unpickle what comes through it is the thing that is measured. Nothing else ever connects to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from syncstack.transports.cuda.digests import by_host
from syncstack.transports.endpoint import WorkerEndpoint
from syncstack.weights.digest import digest
from syncstack.weights.meta import ParamMeta
from syncstack.wire import tcp
from syncstack.wire.auth import Token
from syncstack.wire.tcp import Address

LINK_S = 60.0


class Receiver:
    """Weights of its own, and every way in which new values can get into them."""

    def __init__(self, pipe: Connection, folder: Path, device: str, token: str) -> None:
        self._pipe = pipe
        self._device = torch.device(device)
        listener = tcp.listen(Address("127.0.0.1", 0))
        self.endpoint = WorkerEndpoint(
            folder / "worker-0.sock",
            rank=0,
            link_s=LINK_S,
            tcp=listener,
            token=Token(token.encode()),
            device=lambda: self._device,
        )
        self._own: dict[str, torch.Tensor] = {}

    def own(self, metas: list[ParamMeta]) -> int:
        """Make the weights; returns the endpoint's port."""
        for meta in metas:
            dtype = getattr(torch, meta.dtype)
            self._own[meta.name] = torch.zeros(meta.shape, dtype=dtype, device=self._device)
        return self.endpoint.port

    def load(self, session: str) -> None:
        """What a worker's endpoint has verified, into the weights; verified again, as an engine does."""
        version = self.endpoint.take(session)
        for name, view in version.views():
            self._own[name].copy_(view)
        self._settle()
        version.check_again()
        self.endpoint.drop(session)

    def arrays(self) -> None:
        """Arrays of bytes that come through the pipe by value."""
        for name, array in self._pipe.recv().items():
            self._bytes(name).copy_(torch.from_numpy(array))
        self._settle()

    def shared(self) -> None:
        """Tensors that come as torch.multiprocessing shares them."""
        for name, tensor in self._pipe.recv().items():
            self._own[name].copy_(tensor)
        self._settle()

    def flat(self) -> None:
        """One tensor with the bytes of all, shared by torch."""
        self._split(self._pipe.recv())

    def join(self, store: str) -> None:
        """Make a group of two with the sender."""
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=1, world_size=2, timeout=timedelta(seconds=LINK_S)
        )

    def broadcast(self) -> None:
        """One broadcast of the bytes of all, into the weights."""
        flat = torch.empty(sum(one.nbytes for one in self._own.values()), dtype=torch.uint8)
        torch.distributed.broadcast(flat, src=0)
        self._split(flat)

    def digest(self) -> str:
        """Of the weights as they are."""
        return digest_of(self._own)

    def _bytes(self, name: str) -> torch.Tensor:
        return self._own[name].view(-1).view(torch.uint8)

    def _split(self, flat: torch.Tensor) -> None:
        low = 0
        for name, tensor in self._own.items():
            self._bytes(name).copy_(flat[low : low + tensor.nbytes])
            low += tensor.nbytes
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def serve(pipe: Connection, folder: str, device: str, token: str) -> None:
    """Answer ``(method, arguments)`` with ``(what it returned, "")`` or ``(None, why not)`` until the pipe ends."""
    receiver = Receiver(pipe, Path(folder), device, token)
    try:
        while True:
            name, arguments = pipe.recv()
            pipe.send(_called(receiver, name, arguments))
    except EOFError:
        receiver.endpoint.close()


def _called(receiver: Receiver, name: str, arguments: tuple[Any, ...]) -> tuple[Any, str]:
    try:
        return getattr(receiver, name)(*arguments), ""
    except Exception as error:  # noqa: BLE001 - the row of the table says it
        return None, f"{type(error).__name__}: {error}"


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """One digest of all, by name."""
    return digest("".join(by_host([tensors[name] for name in sorted(tensors)])()).encode())
