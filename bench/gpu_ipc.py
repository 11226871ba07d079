"""One side of the drop-in's GPU tests: plain torch.multiprocessing pickles of CUDA tensors, in a process of its own.

``python -m bench.gpu_ipc FOLDER PROFILE INSTALL``: ``INSTALL`` is yes or no. Both sides are this.
"""

from __future__ import annotations

import gc
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from bench.serve import Answer, confine, serve


class Side:
    """What a trainer or an engine does with torch's sharing, without a line of ours but ``install``."""

    def __init__(self, folder: str, install: bool) -> None:
        from syncstack.compat import torch_ipc

        self._torch_ipc = torch_ipc
        if install:
            torch_ipc.install(folder=Path(folder))
        self.held: list[Any] = []

    def make(self, shapes: list[list[int]]) -> Answer:
        """Random weights, bf16."""
        import torch

        self.held = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for shape in shapes]
        return {"expandable": any(one.get("is_expandable") for one in torch.cuda.memory_snapshot())}

    def share(self) -> Answer:
        """Every tensor as torch.multiprocessing would send it."""
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing  # noqa: F401 - registers torch's reductions

        begin = time.perf_counter()
        found = [bytes(ForkingPickler.dumps(tensor)).hex() for tensor in self.held]
        return {"pickles": found, "ms": (time.perf_counter() - begin) * 1e3}

    def take(self, pickles: list[str]) -> Answer:
        """Open what the other process has shared."""
        import torch

        torch.cuda.init()
        begin = time.perf_counter()
        self.held = [pickle.loads(bytes.fromhex(one)) for one in pickles]  # noqa: S301 - as torch does
        return {"ms": (time.perf_counter() - begin) * 1e3}

    def digest(self) -> Answer:
        """Of everything that is held, by the CPU's code."""
        from syncstack.transports.cuda.digests import by_host
        from syncstack.weights.digest import digest

        return {"digest": digest("".join(by_host(self.held)()).encode())}

    def write(self, value: float) -> Answer:
        """Into the first tensor."""
        import torch

        self.held[0].fill_(value)
        torch.cuda.synchronize()
        return {}

    def drop(self) -> Answer:
        """Give everything back."""
        import torch

        self.held = []
        gc.collect()
        torch.cuda.ipc_collect()
        time.sleep(0.2)
        return {}

    def state(self) -> Answer:
        """What the drop-in has to tell of itself, and what the process holds."""
        import torch

        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        (patch,) = self._torch_ipc._INSTALLED
        return {
            "native": [] if patch._borrower is None else sorted(set(patch._borrower._native.values())),
            "copied": patch._borrower is not None and patch._borrower._warned,
            "entries": 0 if patch._lender is None else len(patch._lender[1]._entries),
            "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "gpu_free": torch.cuda.mem_get_info()[0],
        }


def main() -> None:
    """Serve commands until stdin ends."""
    folder, profile, install = sys.argv[1:]
    confine(profile)
    side: Any = Side(folder, install == "yes")
    serve(side, {})


if __name__ == "__main__":
    main()
