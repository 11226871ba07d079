"""A trainer in its own process: changes its weights, refits, and prints one JSON line per refit.

usage: trainer.py ADDRESS MODEL NUM_REFITS [SEED]
With TRAINER_HIDES it becomes undumpable between its hello and its first refit.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

import msgspec
import torch
from transformers import AutoModelForCausalLM

from syncstack import Coordinator, EngineClient, ModuleSource, Settings
from syncstack.errors import SyncstackError

PR_SET_DUMPABLE = 4


def logprobs(model: torch.nn.Module) -> list[float]:
    """What the engine's greedy completion of the fixed prompt must be."""
    ids, found = [5, 6, 7, 8], []
    with torch.inference_mode():
        for _ in range(4):
            scores = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1], dim=-1)
            ids.append(int(scores.argmax()))
            found.append(float(scores[ids[-1]]))
    return found


def change(model: torch.nn.Module, seed: int | None = None) -> None:
    """One small step of every weight; with a ``seed`` always the same one."""
    if seed is not None:
        torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def main() -> None:
    address, folder, num_refits = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.manual_seed(int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    settings = Settings.load()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = EngineClient.connect(address, settings=settings)
    with Coordinator(source=ModuleSource(model), engines=[engine], settings=settings) as coordinator:
        print(json.dumps({"ready": True, "pidfd_getfd": coordinator.hello.facts.pidfd_getfd.verdict}), flush=True)
        if "TRAINER_HIDES" in os.environ:
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        for version in range(1, num_refits + 1):
            change(model)
            begin = time.monotonic()
            try:
                (report,) = coordinator.refit(version)
            except SyncstackError as error:
                line = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
                print(json.dumps({**line, "phase": getattr(error, "phase", None)}), flush=True)
                raise SystemExit(error.exit_code) from None
            print(json.dumps({**msgspec.to_builtins(report), "logprobs": logprobs(model)}), flush=True)


if __name__ == "__main__":
    main()
