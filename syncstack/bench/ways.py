"""The ways by which a version gets from one process to another: ours, those of others, and the floor.

Those of others are written out from what is published: a handle for each tensor (torch.multiprocessing), one handle for
a bucket into which all were copied (SGLang's flattened bucket, verl), and values pickled through a pipe. A way ends
when the receiver's own weights hold the version; ours has verified it twice by then, and theirs has not.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Self

import torch
import torch.multiprocessing

from syncstack.bench.receiver import LINK_S, digest_of, serve
from syncstack.errors import DeadlineExceeded, LinkLost, TransportError
from syncstack.settings import Settings
from syncstack.threads import in_thread
from syncstack.transports.order import await_done, mark
from syncstack.transports.senders import make_sender
from syncstack.weights.manifest import resolve
from syncstack.weights.source import ModuleSource
from syncstack.wire import tcp, unix
from syncstack.wire.auth import Token, prove_as_trainer
from syncstack.wire.link import Link, greet
from syncstack.wire.tcp import Address

Move = Callable[[], None]
"""Moves one version, and returns when it is in the receiver's weights."""


class Pair:
    """The sender's weights in this process, and a receiver in another. Close it."""

    def __init__(self, module: torch.nn.Module, device: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="syncstack-bench-")
        self.path = Path(self._folder.name)
        self.token = secrets.token_hex(32)
        self.module = module
        self.tensors = dict(ModuleSource(module))
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self._folder.name, device, self.token), name="syncstack-bench", daemon=True
        )
        self._process.start()
        theirs.close()
        self.undo = ExitStack()
        self.port: int = self.ask("own", list(ModuleSource(module).metadata()))

    def change(self) -> None:
        """Other values, so that what the receiver has already is no result."""
        for tensor in self.tensors.values():
            tensor.copy_(tensor.roll(1))

    def digest(self) -> str:
        """What the receiver's must be."""
        return digest_of(self.tensors)

    def ask(self, name: str, *arguments: Any, then: Any = None) -> Any:
        """Call a method of the receiver; ``then`` is what it reads from the pipe. Raises TransportError with what it
        answers instead, LinkLost when it has ended, DeadlineExceeded."""
        pipe: Connection = self._pipe
        said = None if then is None else ForkingPickler.dumps(then)  # first: what it raises leaves the pipe as it was
        try:
            pipe.send((name, arguments))
            if said is not None:
                pipe.send_bytes(said)
            if not pipe.poll(LINK_S):
                raise DeadlineExceeded(f"the receiver did not answer {name} within {LINK_S:g} s")
            answer, why = pipe.recv()
        except (EOFError, OSError) as error:
            raise LinkLost(f"the receiver ended in {name}", observed=str(error) or type(error).__name__) from None
        if why:
            raise TransportError(why)
        return answer

    def close(self) -> None:
        """End the receiver."""
        self.undo.close()
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ours:
    """One of our transports, over a link of its own."""

    def __init__(self, pair: Pair, transport: str) -> None:
        """Raises PlanError or TransportError where it cannot be used here."""
        self._pair = pair
        self._source = ModuleSource(pair.module)
        deadline = time.monotonic() + LINK_S
        by_folder = transport in ("host_fd", "cuda_fd", "cuda_ipc")
        self._sender = make_sender(
            transport, bucket_bytes=Settings.model_fields["bucket_bytes"].default, device=_device(pair)
        )
        if by_folder:
            self._link = Link(unix.connect(pair.path / "worker-0.sock", deadline=deadline))
        else:
            self._link = Link(tcp.connect(Address("127.0.0.1", pair.port), deadline=deadline))
            prove_as_trainer(self._link, Token(pair.token.encode()), rank=0, worker=0, deadline=deadline)
        greet(self._link, role="trainer", rank=0, deadline=deadline)
        metas = self._source.metadata()
        self._wanted = resolve(metas, metas, {})

    def __call__(self) -> None:
        """See Move."""
        session = secrets.token_hex(8)
        await_done(mark(), wait_s=LINK_S)
        self._sender.stage(self._source, self._wanted, [self._link], session=session, version=1, wait_s=LINK_S)
        self._pair.ask("load", session)

    def close(self) -> None:
        """Free what was staged."""
        self._link.close()
        self._sender.close()


def _device(pair: Pair) -> str:
    tensor = next(iter(pair.tensors.values()))
    if tensor.device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(tensor.device).uuid}"


def by_pickle(pair: Pair) -> Move:
    """Every value through the host and the pipe: what a driver does that has nothing better."""
    return lambda: pair.ask("arrays", then={name: _bytes(one).cpu().numpy() for name, one in pair.tensors.items()})


def by_torch(pair: Pair) -> Move:
    """A handle for each tensor, as torch.multiprocessing makes it; on the host it moves the tensor into a memfd first,
    and there it stays."""

    def move() -> None:
        _settle(pair)
        pair.ask("shared", then=pair.tensors)

    return move


def by_flat(pair: Pair) -> Move:
    """All tensors copied into one, and a handle for that."""

    def move() -> None:
        flat = _flat(pair)
        _settle(pair)
        pair.ask("flat", then=flat)

    return move


def by_broadcast(pair: Pair) -> Move:
    """One broadcast by Gloo of a flat tensor, in a default group of two: the floor of ``collective``."""
    store = str(pair.path / f"store-{secrets.token_hex(4)}")
    joined = in_thread(lambda: pair.ask("join", store), "syncstack-join")  # both have to be in it at the same time
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=2, timeout=timedelta(seconds=LINK_S)
    )
    pair.undo.callback(torch.distributed.destroy_process_group)
    joined.result(LINK_S)

    def move() -> None:
        flat = _flat(pair).cpu()
        received = in_thread(lambda: pair.ask("broadcast"), "syncstack-broadcast")
        torch.distributed.broadcast(flat, src=0)
        received.result(LINK_S)

    return move


def by_copy(pair: Pair) -> Move:
    """One copy of every byte where it lies, in this process: the floor of what is handed over in place."""
    source = _flat(pair)
    target = torch.empty_like(source)

    def move() -> None:
        target.copy_(source)
        _settle(pair)

    return move


def by_bus(pair: Pair) -> Move:
    """From the GPU into page-locked memory and back at the same time, each all bytes: the floor of what is staged."""
    source = _flat(pair)
    if source.device.type != "cuda":
        return by_copy(pair)
    target = torch.empty_like(source)
    host = torch.empty(2, source.numel(), dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]

    def move() -> None:
        for stream, to, at in zip(streams, (host[0], target), (source, host[1]), strict=True):
            with torch.cuda.stream(stream):
                to.copy_(at, non_blocking=True)
        _settle(pair)

    return move


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _flat(pair: Pair) -> torch.Tensor:
    return torch.cat([_bytes(tensor) for tensor in pair.tensors.values()])


def _settle(pair: Pair) -> None:
    if next(iter(pair.tensors.values())).device.type == "cuda":
        torch.cuda.synchronize()
