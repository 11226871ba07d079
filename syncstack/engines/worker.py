"""What every engine's worker does with a staged version, whatever the engine.

The engine's adapter supplies a Loader; its front end reaches ``EngineWorker.call`` by the engine's own means (vLLM's
collective_rpc, a method call in the reference engine). Only plain data crosses: names of operations, session ids,
dicts of numbers and texts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
import torch

from syncstack.engines.listen import Listen
from syncstack.errors import LoadFailed, ProtocolError, SyncstackError
from syncstack.facts import collect, say_hello
from syncstack.refit.messages import ErrorReply, WorkerInfo
from syncstack.settings import Settings
from syncstack.transports import SPOKEN
from syncstack.transports.cuda.placement import placement
from syncstack.transports.endpoint import WorkerEndpoint
from syncstack.transports.staged import JointVersion, StagedVersion
from syncstack.weights.manifest import MAX_LISTED, content_digest, fingerprint


class Loader(Protocol):
    """An engine's own way to take a full set of weights, in checkpoint names."""

    def example(self) -> torch.Tensor | None:
        """One of the engine's own parameters as it lies now: tells where the weights go."""
        ...

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load everything; may keep the views until it returns, must not write into them. Raises on any failure."""
        ...

    def verify(self) -> list[str]:
        """Names of the engine's own parameters that the last load did not fill; empty when all were."""
        ...

    def recover(self) -> None:
        """After a failed load: forget half-loaded layers, so that the next full load starts afresh."""
        ...


def _finish(example: torch.Tensor | None) -> None:
    """Block until the device has loaded what it was asked to load: only then is it known whether it could, and how long
    it took."""
    if example is not None and example.device.type == "cuda":
        torch.cuda.synchronize(example.device)


class EngineWorker:
    """One worker: its data sockets, and the operations of the transaction. ``call`` never raises."""

    def __init__(self, loader: Loader, *, settings: Settings, rank: int) -> None:
        """Open the data sockets that ``settings.listen`` asks for; raises SettingsError or UsageError if it cannot."""
        self._loader = loader
        self._rank = rank
        self._name = settings.engine_name
        # A load that its caller gave up may still run: the next one waits until it has noticed.
        self._loading = threading.Lock()
        listen = Listen.of(settings)
        self._folder = listen.folder
        listener = listen.open_worker(rank)
        self._endpoint = WorkerEndpoint(
            None if listen.folder is None else listen.folder / f"worker-{rank}.sock",
            rank=rank,
            link_s=settings.link_s,
            tcp=listener,
            token=None if listener is None else settings.required_token(f"listening on {listen.tcp}"),
            device=self._device,
        )

    def _device(self) -> torch.device | None:
        example = self._loader.example()
        return None if example is None else example.device

    def info(self) -> WorkerInfo:
        """Who this worker is, with its own facts: they decide, not the front end's."""
        folder, path = self._folder, self._endpoint.path
        # Without a socket in it, a folder that both mount is no way for descriptors.
        facts = collect(socket_dir=None if folder is None else folder.parent)
        device, memory = placement(self._loader.example(), facts)
        hello = say_hello(
            "engine",
            rank=self._rank,
            name=self._name,
            device=device,
            memory=memory,
            transports=SPOKEN,
            facts=facts,
        )
        return WorkerInfo(socket="" if path is None else path.name, port=self._endpoint.port, hello=hello)

    def call(self, op: str, session: str = "", expect: str = "") -> dict[str, Any]:
        """Run ``info``, ``load``, ``verify`` or ``finish``; a failure comes back as ``{"error": ...}``.

        ``expect`` is the fingerprint of what ``begin`` accepted: nothing else is loaded.
        """
        try:
            if op == "info":
                info: dict[str, Any] = msgspec.to_builtins(self.info())
                return info
            if op == "load":
                with self._loading:
                    return self._load(session, expect)
            if op == "verify":
                with self._loading:
                    return self._verify(session, expect)
            if op == "finish":
                self._endpoint.drop(session)
                return {}
            raise LoadFailed(f"unknown operation {op!r}")
        except SyncstackError as error:
            return {"error": msgspec.to_builtins(ErrorReply.of(error))}
        except Exception as error:  # noqa: BLE001 - whatever an engine raises goes back as data
            failed = LoadFailed(f"worker {self._rank} failed in {op}", observed=f"{type(error).__name__}: {error}")
            return {"error": msgspec.to_builtins(ErrorReply.of(failed))}

    def _take(self, session: str, expect: str) -> StagedVersion | JointVersion:
        version = self._endpoint.take(session)
        if fingerprint(version.version, version.tensors) != expect:
            raise ProtocolError(
                "the staged weights are not those that begin announced", consequence="They were not loaded"
            )
        return version

    def _load(self, session: str, expect: str) -> dict[str, Any]:
        version = self._take(session, expect)
        begin = time.perf_counter()
        try:
            self._loader.load(version.views())
            _finish(self._loader.example())
            version.check_unchanged()
        except BaseException:
            self._loader.recover()
            raise
        return {"load_s": time.perf_counter() - begin, "tensors": len(version.tensors)}

    def _verify(self, session: str, expect: str) -> dict[str, Any]:
        version = self._take(session, expect)
        version.check_again()
        missed = self._loader.verify()
        if missed:
            more = f" and {len(missed) - MAX_LISTED} more" if len(missed) > MAX_LISTED else ""
            raise LoadFailed(
                "the engine's loader took the weights but left parameters as they were: "
                + ", ".join(sorted(missed)[:MAX_LISTED])
                + more,
                expected="every parameter filled",
                next_step="this model's loader drops names; report it with the model's architecture",
            )
        self._endpoint.drop(session)  # nothing reads it any more
        return {"tensors": len(version.tensors), "manifest": content_digest(version.verified())}

    def close(self) -> None:
        """Close the data sockets and every link."""
        self._endpoint.close()
