"""`python -m bench.gpu_fd`: versions of Qwen2.5-3B's shapes (434 tensors, bf16, 6.2 GB; once Qwen3-30B-A3B's, 61 GB)
from a trainer's GPU memory to a worker in another process, PID namespace and IPC namespace, as nobody, without a
capability, both under the restrictive profile. Correctness first, then numbers, beside a copy and a digest of the same
bytes, and the bus with both directions busy, in the same run.

To be run as root (it makes the namespaces and gives up its rights in the children), with one NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.child import NOBODY, Child
from bench.qwen import machine, moe_shapes, shapes


class Pair:
    """A trainer and a worker."""

    def __init__(
        self,
        *,
        transport: str = "cuda_fd",
        profile: str = "restrictive",
        apart: bool = True,
        expandable: bool = True,
        bucket_mib: int = 64,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        os.chown(folder, NOBODY, NOBODY)
        self._path = folder / "worker-0.sock"
        self._profile = profile
        self._transport = transport
        self._bucket = str(bucket_mib << 20)
        self._apart = apart
        self.worker = self._started("worker", expandable=False)
        self.trainer = self._started("trainer", expandable=expandable)

    def _started(self, role: str, *, expandable: bool) -> Child:
        arguments = ["-m", "bench.gpu_child", role, str(self._path), self._profile, self._transport, self._bucket]
        return Child(arguments, self._path.parent / f"home-{role}", apart=self._apart, expandable=expandable)

    def renew_worker(self) -> None:
        """Another worker in the place of one that ended."""
        self._path.unlink(missing_ok=True)
        self.worker = self._started("worker", expandable=False)

    def refit(self, *, digest: bool = False) -> dict[str, Any]:
        """Stage and load one version."""
        staged = self.trainer.ask("stage")
        return {**staged, **self.worker.ask("load", session=staged["session"], digest=digest)}

    def right(self) -> None:
        """Raise unless what the worker loaded is what the trainer has."""
        found, wanted = self.refit(digest=True)["digest"], self.trainer.ask("digest")["digest"]
        if found != wanted:
            raise RuntimeError("the worker loaded something else than the trainer has")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for child in (self.trainer, self.worker):
            child.kill()
        self._folder.cleanup()


def measure(rounds: int, *, moe: bool = False, **options: Any) -> dict[str, Any]:
    """One pair's numbers. Raises RuntimeError where anything is not right."""
    wanted = [list(shape) for shape in (moe_shapes() if moe else shapes())]
    with Pair(**options) as pair:
        made = pair.trainer.ask("make", shapes=wanted)
        floor = pair.trainer.ask("floor")
        pair.trainer.ask("make", shapes=[[8]])  # what is compiled at first use is not part of the first refit
        pair.refit()
        pair.worker.ask("forget")
        pair.trainer.ask("make", shapes=wanted)
        first = pair.refit()
        pair.right()
        found: list[dict[str, Any]] = []
        for number in range(rounds):
            pair.trainer.ask("change", number=number, step=1)
            found.append(pair.refit())
        pair.trainer.ask("move", number=5)
        moved = pair.refit()
        pair.right()
        hello = {"trainer": pair.trainer.hello, "worker": pair.worker.hello}
    keys = ("ms", "map_ms", "worker_digest_ms", "load_ms", "again_ms")
    steady = {key: round(statistics.median(one[key] for one in found), 2) for key in keys}
    return {
        "options": options, "processes": hello, "made": made, "floor": floor, "rounds": rounds,
        "first": {key: round(first[key], 2) for key in keys},
        "steady": steady,
        "steady_worst_ms": round(max(one["ms"] for one in found), 2),
        "after_one_tensor_moved": {key: round(moved[key], 2) for key in keys},
    }  # fmt: skip


def main() -> None:
    """Measure each way, print, and write JSON where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_fd", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument("--only", default="", help="the ways that have this in their names")
    parser.add_argument("--sweep", type=int, nargs="*", help="sizes of host_fd's buckets, in MiB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ways: dict[str, dict[str, Any]] = {
        "cuda_fd: expandable segments, restrictive, other PID and IPC namespace": {},
        "cuda_fd: the same namespaces": {"apart": False},
        "cuda_fd: plain cudaMalloc, restrictive, other PID and IPC namespace": {"expandable": False},
        "cuda_ipc: plain cudaMalloc, restrictive, one PID namespace": {
            "transport": "cuda_ipc",
            "apart": False,
            "expandable": False,
        },
        "host_fd: expandable segments, restrictive, other PID and IPC namespace": {"transport": "host_fd"},
        "cuda_fd: 61 GB, restrictive, other PID and IPC namespace": {"moe": True},
        **{
            f"host_fd: buckets of {mib} MiB": {"transport": "host_fd", "bucket_mib": mib}
            for mib in (arguments.sweep or ())
        },
    }
    ways = {name: options for name, options in ways.items() if arguments.only in name}
    result: dict[str, Any] = {"commit": arguments.commit, "machine": machine(), "ways": {}}
    for name, options in ways.items():
        try:
            result["ways"][name] = measure(arguments.rounds, **options)
        except RuntimeError as error:
            result["ways"][name] = {"error": str(error)}
        print(name, json.dumps(result["ways"][name], indent=1), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
