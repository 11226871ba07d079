"""`python -m bench.gpu_digest`: the digest on a GPU against one copy of the same bytes, device to device, in one run.

Qwen2.5-3B's shapes in bf16 (434 tensors, 6.2 GB). First every digest is compared with the CPU's, odd sizes and places
too. A copy moves every byte twice, so its bandwidth counts bytes read and written; the digest's counts bytes read.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.qwen import machine, shapes
from syncstack.weights.digest import ALGORITHM, LEAF_BYTES, digest
from syncstack.weights.digest_gpu import UNROLL, DeviceHasher, Spans, constants, launch, leaf_table
from syncstack.weights.digest_kernel import leaf_hashes

SIZES = (0, 1, 63, 1023, 1024, 1025, 5000, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES + 777)
SMALL = slice(1, 60)
"""The tensors of five layers, 771 MB: how it goes with fewer bytes."""
OFFSETS = (0, 1, 2, 3, 7, 8, 13, 16, 4096 + 6)


def views(flat: torch.Tensor, shift: int) -> list[torch.Tensor]:
    """The model's tensors in ``flat``, each ``shift`` bytes after a multiple of 256. Shifted ones stay bytes."""
    found, at = [], shift
    for shape in shapes():
        part = flat[at : at + 2 * math.prod(shape)]
        found.append(part if shift % 2 else part.view(torch.bfloat16).view(shape))
        at += -(-part.nbytes // 256) * 256
    return found


def spans(tensors: list[torch.Tensor]) -> Spans:
    """Where they lie."""
    return tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)


def on_cpu(tensor: torch.Tensor) -> str:
    """The digest by the CPU's code."""
    return digest(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy())


def gpu_ms(call: Callable[[], Any], rounds: int) -> float:
    """Median milliseconds on the device, by events, after two rounds of warming up."""
    found = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found[2:])


def wall_ms(call: Callable[[], Any], rounds: int) -> float:
    """Median milliseconds of the host, the wait for the device in it."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found)


def check(hasher: DeviceHasher, flat: torch.Tensor) -> dict[str, int]:
    """Compare with the CPU: odd sizes at odd places, a flipped bit, and every tensor of the model."""
    odd = [flat[offset : offset + size] for offset in OFFSETS for size in SIZES]
    model = views(flat, 0)
    for tensors in (odd, model):
        found = hasher.start(tensors).wait(deadline=time.monotonic() + 60)
        assert found == [on_cpu(tensor) for tensor in tensors], "the GPU's digest is not the CPU's"
    flat[1001] ^= 4
    assert hasher.start(model).wait(deadline=time.monotonic() + 60)[0] == on_cpu(model[0]) != found[0]
    return {"odd": len(odd), "model": len(model)}


def check_copy(hasher: DeviceHasher, flat: torch.Tensor) -> int:
    """Copy and digest in one pass: the digests, and every byte of the places and around them."""
    odd = [flat[offset : offset + size] for offset in OFFSETS for size in SIZES if size]
    wholes = [torch.zeros(-(-one.nbytes // 16) * 16 + 16, dtype=torch.uint8, device="cuda") for one in odd]
    found = hasher.copy(odd, [whole[: one.nbytes] for whole, one in zip(wholes, odd, strict=True)])
    assert found.wait(deadline=time.monotonic() + 60) == [on_cpu(one) for one in odd], "not the CPU's digest"
    for whole, one in zip(wholes, odd, strict=True):
        assert torch.equal(whole[: one.nbytes], one) and not whole[one.nbytes :].any(), "the copy is another"
    return len(odd)


def sweep(flat: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of the kernel by leaf size, blocks in one step and warps; all of one leaf size must agree."""
    numbers, found = constants().cuda(), []
    model = views(flat, 0)
    plans = [(1, unroll) for unroll in (1, 2, 4, 8)] + [(2, 4), (4, 4)]
    for leaf_kib in (64, 128, 256, 512, 1024):
        tables = [leaf_table(spans(part), leaf_bytes=leaf_kib << 10).cuda() for part in (model, model[SMALL])]
        known = None
        for warps, unroll in plans:
            row: dict[str, Any] = {"leaf_kib": leaf_kib, "num_warps": warps, "unroll": unroll}
            for name, table in zip(("ms", "ms_small"), tables, strict=True):
                hashes = torch.empty(len(table), dtype=torch.int64, device="cuda")
                args, options = (table, table, numbers, hashes), {"COPY": False, "UNROLL": unroll, "num_warps": warps}
                row[name] = round(gpu_ms(partial(leaf_hashes[(len(table),)], *args, **options), rounds), 3)
                known = hashes if known is None else known
                if name == "ms":
                    assert torch.equal(known, hashes)
            found.append(row)
            print(row, flush=True)
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Everything, as one record."""
    num_bytes = sum(2 * math.prod(shape) for shape in shapes())
    flat = torch.randint(0, 256, (num_bytes + 256 * 434 + 8192,), dtype=torch.uint8, device="cuda")
    target, hasher, numbers = torch.empty_like(flat), DeviceHasher(flat.device), constants().cuda()

    def whole(tensors: list[torch.Tensor]) -> None:
        hasher.start(tensors).wait(deadline=time.monotonic() + 60)

    def kernel(tensors: list[torch.Tensor]) -> float:
        return gpu_ms(partial(launch, leaf_table(spans(tensors)).cuda(), numbers), rounds)

    def copy(size: int) -> float:
        return gpu_ms(partial(target[:size].copy_, flat[:size]), rounds)

    first_ms = wall_ms(partial(whole, [flat[:1]]), 1)
    compared = check(hasher, flat)
    compared["copied"] = check_copy(hasher, flat)
    model = views(flat, 0)
    targets = leaf_table(spans(views(target, 0)))[:, 0].contiguous().cuda()
    small_bytes = sum(tensor.nbytes for tensor in model[SMALL])
    elsewhere = [wall_ms(partial(whole, views(flat[shift:], 0)), 1) for shift in range(256, 256 * 6, 256)]
    ms = {
        "copy": copy(num_bytes),
        "digest": kernel(model),
        "copy_again": copy(num_bytes),
        "copy_and_digest": gpu_ms(partial(launch, leaf_table(spans(model)).cuda(), numbers, targets=targets), rounds),
        "digest_at_8": kernel(views(flat, 8)),
        "digest_at_1": kernel(views(flat, 1)),
        "digest_small": kernel(model[SMALL]),
        "copy_small": copy(small_bytes),
        "to_host_wall": wall_ms(partial(whole, model), rounds),
        "to_host_wall_new_places": statistics.median(elsewhere),
        "first_ever_wall": first_ms,
    }
    best = min(ms["copy"], ms["copy_again"])
    return {
        "bytes": num_bytes,
        "tensors": len(model),
        "bytes_small": small_bytes,
        "tensors_small": len(model[SMALL]),
        "compared_with_the_cpu": compared,
        "algorithm": ALGORITHM,
        "unroll": UNROLL,
        "rounds": rounds,
        "ms": {name: round(value, 3) for name, value in ms.items()},
        "digest_gb_per_s": round(num_bytes / ms["digest"] / 1e6, 1),
        "copy_gb_per_s_read_and_written": round(2 * num_bytes / best / 1e6, 1),
        "of_copy_bandwidth": round(best / 2 / ms["digest"], 3),
        "sweep": sweep(flat, rounds),
    }


def main() -> None:
    """Measure, print, and write JSON where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_digest", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = {"commit": arguments.commit, "machine": machine(), **measure(arguments.rounds)}
    print(json.dumps({name: value for name, value in result.items() if name != "sweep"}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
