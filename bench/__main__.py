"""`make bench`: what host_fd costs, against a floor taken in the same run.

One version of SmolLM2-135M's shapes (bf16, 269 MB) goes from this process to a worker's data socket in another: fill
the segment, digest on both sides, hand over, map. The floor is one memcpy and one digest of the same bytes, taken
between the moves: libc's memcpy in one call of one thread, and torch's copy with all its threads, which is the harsher
one. Reported are medians; a machine's noise is in both sides of the ratio. Where memory lies matters as much (the same
code differs by a fifth from one start to the next), so everything is done in several places: new memory, a new worker.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from syncstack.settings import Settings
from syncstack.transports.host_fd.sender import HostFdSender
from syncstack.weights.digest import ALGORITHM, digest
from syncstack.weights.manifest import resolve
from syncstack.weights.source import ModuleSource
from syncstack.wire import unix
from syncstack.wire.link import Link, greet

HIDDEN, MLP, LAYERS, VOCAB, KV = 576, 1536, 30, 49152, 192
"""SmolLM2-135M."""

COPIES = ("memcpy", "torch_copy")
FAULTS = ("trainer_faults", "worker_faults")
MOVE = ("host_fd", "write", "tail", "worker_digest", *FAULTS)
SECONDS = (*COPIES, "digest", "first", "host_fd", "write", "tail", "worker_digest")


def smollm2_shapes(dtype: torch.dtype) -> torch.nn.Module:
    """A module with the names and shapes of SmolLM2-135M, filled with random numbers."""
    root = torch.nn.Module()

    def put(name: str, *shape: int) -> None:
        module = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_buffer(last, torch.randn(*shape).to(dtype))

    put("model.embed_tokens.weight", VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, rows in (("q", HIDDEN), ("k", KV), ("v", KV)):
            put(f"{layer}.self_attn.{name}_proj.weight", rows, HIDDEN)
        put(f"{layer}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
        put(f"{layer}.mlp.gate_proj.weight", MLP, HIDDEN)
        put(f"{layer}.mlp.up_proj.weight", MLP, HIDDEN)
        put(f"{layer}.mlp.down_proj.weight", HIDDEN, MLP)
        put(f"{layer}.input_layernorm.weight", HIDDEN)
        put(f"{layer}.post_attention_layernorm.weight", HIDDEN)
    put("model.norm.weight", HIDDEN)
    return root


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Floor:
    """One memcpy and one digest of the same number of bytes, in warm memory."""

    def __init__(self, num_bytes: int) -> None:
        self._source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
        self._target = torch.empty_like(self._source)
        self._target.copy_(self._source)
        self._view = memoryview(self._source.numpy())

    def memcpy(self) -> None:
        """libc's copy: one call, one thread."""
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._source.numel())

    def torch_copy(self) -> None:
        """torch's copy, with all of torch's threads."""
        self._target.copy_(self._source)

    def digest(self) -> None:
        """One pass of the digest, one thread."""
        digest(self._view)


def faults(pid: int) -> int:
    """Page faults of a process so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def measure(places: int, rounds: int, bucket_bytes: int) -> dict[str, list[float]]:
    """What ``measure_once`` finds in each of several places, together."""
    found: dict[str, list[float]] = {name: [] for name in (*SECONDS, *FAULTS)}
    for _ in range(places):
        for name, values in measure_once(rounds, bucket_bytes).items():
            found[name] += values
    return found


def measure_once(rounds: int, bucket_bytes: int) -> dict[str, list[float]]:
    """Seconds (and page faults) of each kind, round by round; the first, which makes the segment, is kept apart."""
    source = ModuleSource(smollm2_shapes(torch.bfloat16))
    metas = source.metadata()
    wanted = resolve(metas, metas, {})
    floor = Floor(sum(meta.nbytes for meta in metas))
    found: dict[str, list[float]] = {name: [] for name in (*SECONDS, *FAULTS)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worker-0.sock"
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin and child.stdout
        child.stdout.readline()
        link = Link(unix.connect(path, deadline=time.monotonic() + 30))
        greet(link, role="trainer", rank=0, deadline=time.monotonic() + 30)
        sender = HostFdSender(bucket_bytes=bucket_bytes)

        def move() -> list[float]:
            """One version: the whole, the writing, the waiting that is left then, the worker's digest; and faults."""
            before = faults(os.getpid()), faults(child.pid)
            begin = time.perf_counter()
            _, (staged,) = sender.stage(source, wanted, [link], session=secrets.token_hex(8), version=1, wait_s=60.0)
            whole = time.perf_counter() - begin
            after = faults(os.getpid()), faults(child.pid)
            parts = [whole, sender.write_s, whole - sender.write_s, staged.digest_s]
            return [*parts, after[0] - before[0], after[1] - before[1]]

        found["first"].append(move()[0])
        for _ in range(rounds):
            for name, call in (("memcpy", floor.memcpy), ("torch_copy", floor.torch_copy), ("digest", floor.digest)):
                found[name].append(timed(call))
            for name, value in zip(MOVE, move(), strict=True):
                found[name].append(value)
        link.close()
        sender.close()
        child.stdin.close()
        child.wait(timeout=30)
    return found


def summary(found: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    """Medians, rates and the ratio."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = {copy: round(medians["host_fd"] / (medians[copy] + medians["digest"]), 3) for copy in COPIES}
    return {
        "bytes": num_bytes,
        "rounds": len(found["host_fd"]),
        "ms": {name: round(medians[name] * 1e3, 2) for name in SECONDS},
        "gb_per_s": {name: round(num_bytes / medians[name] / 1e9, 2) for name in (*COPIES, "digest", "host_fd")},
        "page_faults": {name.removesuffix("_faults"): int(medians[name]) for name in FAULTS},
        "ratio_to": ratios,
        "ratio_to_floor": max(ratios.values()),
        "digest": ALGORITHM,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "libc": " ".join(platform.libc_ver()),
        "machine": {
            "cpus": os.cpu_count(),
            "model": cpu_model(),
            "arch": platform.machine(),
            "kernel": platform.release(),
        },
        "load_before": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """The processor's name, as far as the kernel knows it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def show(result: dict[str, Any]) -> None:
    """Print the table and the ratios, the harsher one first."""
    table = Table(title=f"host_fd, {result['bytes'] / 1e6:.0f} MB, median of {result['rounds']}")
    for column in ("what", "ms", "GB/s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows = {
        "memcpy": "floor: one memcpy, libc, 1 thread",
        "torch_copy": f"floor: one copy, torch, {result['threads']} threads",
        "digest": f"floor: one digest, {result['digest']}, 1 thread",
        "host_fd": "host_fd: fill, digest on both sides, hand over",
        "write": "  of it: written, digested, announced",
        "tail": "  of it: the rest, waiting for the worker",
        "worker_digest": "  beside it: the worker's digest",
        "first": "host_fd, first time: also reserve and map",
    }
    for key, label in rows.items():
        rate = result["gb_per_s"].get(key)
        table.add_row(label, f"{result['ms'][key]:.1f}", "" if rate is None else f"{rate:.1f}")
    console = Console()
    console.print(table)
    names = {"memcpy": "libc's memcpy", "torch_copy": "torch's copy"}
    for copy, ratio in sorted(result["ratio_to"].items(), key=lambda item: -item[1]):
        console.print(f"ratio to {names[copy]} + digest: {ratio} (target: 1.2 or less)")
    console.print("page faults of one move:", ", ".join(f"{who} {n}" for who, n in result["page_faults"].items()))


def main() -> None:
    """Measure, print, and write JSON where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--places", type=int, default=7, help="times that everything is made anew")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in each place")
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument("--bucket-mib", type=float, default=Settings.model_fields["bucket_bytes"].default / 2**20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    num_bytes = sum(meta.nbytes for meta in ModuleSource(smollm2_shapes(torch.bfloat16)).metadata())
    result = summary(measure(arguments.places, arguments.rounds, int(arguments.bucket_mib * 2**20)), num_bytes)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps({"commit": arguments.commit, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
