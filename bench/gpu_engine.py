"""`python -m bench.gpu_engine ENGINE`: a real engine with Qwen2.5-3B's shapes takes versions from a trainer's GPU.

Trainer and engine are in PID and IPC namespaces of their own, as nobody, without a capability, both under the
restrictive profile; the engine is started by `syncstack engine`, as in its image. After each version the engine's
greedy tokens are judged by the trainer's model. To be run as root, with one NVIDIA GPU and the engine installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from bench.child import NOBODY, Child, end, start
from bench.qwen import HIDDEN, KV, LAYERS, MLP, VOCAB, machine, named_shapes

PROMPTS = [[5, 17, 99, 3, 250], list(range(10, 74)), [1000, 1, 2, 3], [7] * 33]
NEW_TOKENS = 24
MOST = 0.25
"""Standard deviations that a right token may lie below the best; with the old weights it is 5 and more."""

PORT = 18000
CLI = "from syncstack.cli import main; main()"
ARGUMENTS = {
    "vllm": (
        "--load-format=dummy", "--skip-tokenizer-init", "--enforce-eager", "--attention-backend=FLASH_ATTN",
        "--max-model-len=1024", "--max-num-seqs=16", "--gpu-memory-utilization=0.3",
    ),
    "sglang": (
        "--load-format=dummy", "--skip-tokenizer-init", "--skip-server-warmup", "--attention-backend=triton",
        "--sampling-backend=pytorch", "--grammar-backend=none", "--mem-fraction-static=0.3", "--context-length=1024",
        "--max-running-requests=16", "--disable-decode-cuda-graph", "--disable-prefill-cuda-graph",
        "--log-level=warning",
    ),
}  # fmt: skip


def write_model(folder: Path) -> None:
    """A model folder whose weights are a hole: an engine is started with random ones, and reads the header alone."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": MLP, "vocab_size": VOCAB,
        "num_attention_heads": HIDDEN // 128, "num_key_value_heads": KV // 128, "tie_word_embeddings": True,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "bos_token_id": 0, "eos_token_id": 0, "use_cache": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in named_shapes():
        nbytes = 2
        for length in shape:
            nbytes *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


class Pair:
    """A trainer and an engine, started together."""

    def __init__(self, kind: str, *, profile: str = "restrictive", expandable: bool = True, home: str = "") -> None:
        """``home`` is a folder of nobody's with the engine's caches from an earlier start."""
        self._kind = kind
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        folder.chmod(0o755)
        write_model(folder / "model")
        sockets = folder / "sockets"
        sockets.mkdir()
        os.chown(sockets, NOBODY, NOBODY)
        filtered = ("-c", CLI, "seccomp", "run", profile, "--") if profile else ()
        engine = ("engine", kind, "--model", str(folder / "model"), "--socket-dir", str(sockets), "--port", str(PORT))
        command = [*filtered, *((sys.executable,) if profile else ()), "-c", CLI, *engine, "--", *ARGUMENTS[kind]]
        unset = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0", "VLLM_CACHE_ROOT": str(folder / "home-engine" / "vllm")}
        self.log = folder / "engine.log"
        begin = time.perf_counter()
        with self.log.open("w") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            caches = Path(home) if home else folder / "home-engine"
            self._engine = start(command, caches, apart=True, expandable=False, pipes=pipes, env=unset)
        address = f"unix:{sockets}/engine-0"
        arguments = ["-m", "bench.gpu_trainer", address, str(folder / "model"), str(sockets), profile]
        try:
            self.trainer = Child(arguments, folder / "home-trainer", apart=True, expandable=expandable)
        except BaseException:
            self._tell()
            end(self._engine)
            raise
        self.ready_s = time.perf_counter() - begin

    def _tell(self) -> None:
        """The end of the engine's log, with where each of its threads is."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._engine.pid, signal.SIGABRT)
            time.sleep(2)
        print(self.log.read_text()[-8000:], file=sys.stderr, flush=True)

    def generate(self) -> list[list[int]]:
        """The engine's greedy tokens, over its own API."""
        return [self._completion(prompt) for prompt in PROMPTS]

    def _completion(self, prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0, "ignore_eos": True}
        if self._kind == "vllm":
            body = {"model": str(self.log.parent / "model"), "prompt": prompt, "max_tokens": NEW_TOKENS, **sampling}
            body["return_token_ids"] = True
        else:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": NEW_TOKENS, **sampling}}
        path = {"vllm": "/v1/completions", "sglang": "/generate"}[self._kind]
        answer = httpx.post(f"http://127.0.0.1:{PORT}{path}", json=body, timeout=180)
        answer.raise_for_status()
        found = answer.json()
        tokens: list[int] = found["choices"][0]["token_ids"] if self._kind == "vllm" else found["output_ids"]
        return tokens[-NEW_TOKENS:]

    def judged(self, outputs: list[list[int]]) -> float:
        """How far below the best the worst token lies, by the trainer's weights as they are now."""
        found: float = self.trainer.ask("judge", prompts=PROMPTS, outputs=outputs)["worst"]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._tell()
        self.trainer.kill()
        end(self._engine)
        self._folder.cleanup()


def measure(kind: str, rounds: int, **options: Any) -> dict[str, Any]:
    """Versions into one engine; RuntimeError where the engine does not compute with what it was given."""
    with Pair(kind, **options) as pair:
        before, reports, judged = pair.generate(), [], []
        for version in range(1, rounds + 2):
            pair.trainer.ask("seed", seed=version)
            report = pair.trainer.ask("refit", version=version)
            after = pair.generate()
            right, stale = (pair.judged(text) for text in (after, before))
            print(
                f"  version {version}: {report['transport']}, paused {report['paused_seconds'] * 1e3:.1f} ms, worst "
                f"token {right:.3f} std below the best, {stale:.1f} with the old weights",
                flush=True,
            )
            if not right < MOST < stale:
                raise RuntimeError(f"version {version}: worst token {right:.3f} std below the best, old {stale:.3f}")
            reports.append(report)
            judged.append(right)
            before = after
        ready_s, hello = pair.ready_s, pair.trainer.hello
    phases = {name: [report["phases"][name] for report in reports[1:]] for name in reports[0]["phases"]}
    return {
        "options": options, "ready_s": round(ready_s, 1), "trainer": hello,
        "transport": reports[-1]["transport"], "why_not": reports[-1]["why_not"], "unpinned": reports[-1]["unpinned"],
        "bytes": reports[0]["bytes"], "tensors": reports[0]["tensors"], "digests_equal": reports[0]["digests_equal"],
        "worst_token_std": round(max(judged), 3),
        "first_ms": {name: round(seconds * 1e3, 1) for name, seconds in reports[0]["phases"].items()},
        "steady_ms": {name: round(statistics.median(found) * 1e3, 1) for name, found in phases.items()},
        "first_paused_ms": round(reports[0]["paused_seconds"] * 1e3, 1),
        "paused_ms": [round(report["paused_seconds"] * 1e3, 1) for report in reports[1:]],
        "whole_ms": [round(report["seconds"] * 1e3, 1) for report in reports[1:]],
    }  # fmt: skip


def main() -> None:
    """Measure, print, and write JSON where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_engine", description=__doc__)
    parser.add_argument("kind", choices=sorted(ARGUMENTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plain", action="store_true", help="the trainer's memory from plain cudaMalloc")
    parser.add_argument("--home", default="", help="a folder of nobody's that keeps what the engine compiles")
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.kind, arguments.rounds, expandable=not arguments.plain, home=arguments.home)
    result = {"commit": arguments.commit, "engine": arguments.kind, "machine": machine(), **found}
    print(json.dumps(result, indent=1), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
