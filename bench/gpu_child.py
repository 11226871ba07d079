"""One side of ``bench.gpu_fd`` in a process of its own: commands as JSON lines on stdin, answers on stdout.

``python -m bench.gpu_child ROLE SOCKET PROFILE TRANSPORT BUCKET_BYTES``. The profile is applied before torch is
imported; "": none.
"""

from __future__ import annotations

import gc
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.serve import Answer, confine, serve


def milliseconds(call: Callable[[], Any]) -> float:
    """Of one call, what the GPU has to do included."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def copy_ms(nbytes: int) -> list[float]:
    """Five copies on the device, in memory that is given back."""
    import torch

    source, target = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda").unbind()
    return [milliseconds(partial(target.copy_, source)) for _ in range(5)]


def both_ways_gb_s() -> float:
    """How fast the bus is in each direction while the other is busy too: the median of five."""
    import torch

    nbytes = 1 << 30
    host = torch.empty(2, nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def both() -> None:
        for stream, target, source in zip(streams, (host[0], device[1]), (device[0], host[1]), strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    return nbytes / sorted(milliseconds(both) for _ in range(5))[2] / 1e6


def digest_all(digester: Any, tensors: list[Any]) -> list[str]:
    """Start, and wait."""
    found: list[str] = digester(tensors)()
    return found


def usage() -> Answer:
    """What this process holds."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    return {
        "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "gpu_free": torch.cuda.mem_get_info()[0],
    }


class Trainer:
    """Weights of a model's shapes, and a sender."""

    def __init__(self, path: str, transport: str, bucket_bytes: int) -> None:
        import torch

        from syncstack.transports.senders import make_sender
        from syncstack.wire import unix
        from syncstack.wire.link import Link, greet

        self.path = Path(path)
        self.link = Link(unix.connect(self.path, deadline=time.monotonic() + 60))
        greet(self.link, role="trainer", rank=0, deadline=time.monotonic() + 60)
        self.sender = make_sender(transport, bucket_bytes=bucket_bytes)
        self.module = torch.nn.Module()

    def make(self, shapes: list[list[int]], fill: bool = True) -> Answer:
        """The weights, bf16, random."""
        import torch

        self.module = torch.nn.Module()
        for number, shape in enumerate(shapes):
            tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            self.module.register_buffer(f"w{number}", tensor.normal_() if fill else tensor)
        segments = torch.cuda.memory_snapshot()
        return {"expandable": sum(bool(one.get("is_expandable")) for one in segments), "segments": len(segments)}

    def change(self, number: int, step: int) -> Answer:
        """As an optimiser does: all values, in place, on a stream of its own, and no wait."""
        import torch

        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name == f"w{number}" or number < 0:
                    buffer.add_(step)
            self.done = torch.cuda.Event()
            self.done.record()
        return {}

    def move(self, number: int) -> Answer:
        """Give a tensor other memory, so that the table changes."""
        old = getattr(self.module, f"w{number}")
        setattr(self.module, f"w{number}", old.clone())
        return {"moved": old.data_ptr() != getattr(self.module, f"w{number}").data_ptr()}

    def stage(self) -> Answer:
        """Show the version to the worker; returns when it has verified it."""
        import torch

        from syncstack.collector import full_collection_put_off
        from syncstack.transports.order import await_done
        from syncstack.weights.manifest import resolve
        from syncstack.weights.source import ModuleSource

        source, session = ModuleSource(self.module), secrets.token_hex(8)
        metas = source.metadata()
        wanted = resolve(metas, metas, {})
        torch.cuda.synchronize()
        begin = time.perf_counter()
        await_done(getattr(self, "done", None), wait_s=60)
        with full_collection_put_off():  # as the Coordinator does
            _, (staged,) = self.sender.stage(source, wanted, [self.link], session=session, version=1, wait_s=60)
        ms = (time.perf_counter() - begin) * 1e3
        return {"session": session, "ms": ms, "map_ms": staged.map_s * 1e3, "worker_digest_ms": staged.digest_s * 1e3}

    def floor(self) -> Answer:
        """One copy of all bytes on the device (of 6 GB where that is less) and one digest, in this process; and the
        bus, both ways at once, in GB/s of the slower."""
        import torch

        from syncstack.transports.cuda.digests import make_digester

        tensors = [buffer for _, buffer in self.module.named_buffers()]
        digester = make_digester(tensors[0].device)
        digest_all(digester, tensors)
        nbytes = sum(one.nbytes for one in tensors)
        copies = copy_ms(min(nbytes, 6_200_000_000))
        digests = [milliseconds(partial(digest_all, digester, tensors)) for _ in range(5)]
        torch.cuda.empty_cache()
        return {
            "bytes": sum(one.nbytes for one in tensors),
            "copy_ms": sorted(copies)[2],
            "digest_ms": sorted(digests)[2],
            "bus_both_ways_gb_s": both_ways_gb_s(),
        }

    def digest(self) -> Answer:
        """Of everything, by the CPU's code."""
        from syncstack.transports.cuda.digests import by_host

        return {"digest": hash_of(by_host([buffer for _, buffer in self.module.named_buffers()])())}

    def end_link(self) -> Answer:
        """Drop the link and connect anew, as after a failure."""
        from syncstack.wire import unix
        from syncstack.wire.link import Link, greet

        self.link.close()
        self.sender.retire()
        self.link = Link(unix.connect(self.path, deadline=time.monotonic() + 60))
        greet(self.link, role="trainer", rank=0, deadline=time.monotonic() + 60)
        return {}


class Worker:
    """An engine's worker without an engine: the endpoint, and a loader that copies into weights of its own."""

    def __init__(self, path: str) -> None:
        from syncstack.transports.endpoint import WorkerEndpoint

        self.endpoint = WorkerEndpoint(Path(path), rank=0, link_s=60, device=self._device)
        self.own: dict[str, Any] = {}

    def _device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def load(self, session: str, digest: bool = False) -> Answer:
        """Copy the version into the worker's own weights and check it again, as an engine does."""
        import torch

        from syncstack.transports.cuda.digests import by_host

        torch.cuda.init()
        version = self.endpoint.take(session)
        if not self.own:
            self.own = {name: torch.empty_like(view) for name, view in version.views()}

        def copy() -> None:
            for name, view in version.views():
                self.own[name].copy_(view)

        found: Answer = {"load_ms": milliseconds(copy), "again_ms": milliseconds(version.check_again)}
        if digest:
            found["digest"] = hash_of(by_host(list(self.own.values()))())
        self.endpoint.drop(session)
        return found

    def forget(self) -> Answer:
        """Give up the worker's own weights."""
        self.own = {}
        return {}

    def write(self, session: str) -> Answer:
        """What a loader must not do. Ends this process's context, and nothing of the trainer's."""
        import torch

        for _, view in self.endpoint.take(session).views():
            view.zero_()
            break
        torch.cuda.synchronize()
        return {}


def hash_of(digests: list[str]) -> str:
    """One text for all."""
    from syncstack.weights.digest import digest

    return digest("".join(digests).encode())


def main() -> None:
    """Serve commands until stdin ends."""
    role, path, profile, transport, bucket_bytes = sys.argv[1:]
    confine(profile)
    side: Any = Trainer(path, transport, int(bucket_bytes)) if role == "trainer" else Worker(path)
    serve(side, {"usage": usage})


if __name__ == "__main__":
    main()
