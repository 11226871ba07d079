"""The shapes of Qwen2.5-3B, and what the GPU benchmarks ran on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import torch

HIDDEN, MLP, LAYERS, VOCAB, KV = 2048, 11008, 36, 151936, 256
"""Qwen2.5-3B; its head is tied to its embedding."""


_LAYER = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.q_proj.bias": (HIDDEN,),
    "self_attn.k_proj.weight": (KV, HIDDEN),
    "self_attn.k_proj.bias": (KV,),
    "self_attn.v_proj.weight": (KV, HIDDEN),
    "self_attn.v_proj.bias": (KV,),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (MLP, HIDDEN),
    "mlp.up_proj.weight": (MLP, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, MLP),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}


def named_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model, in order, by its name in a checkpoint."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in _LAYER.items():
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (HIDDEN,)


def shapes() -> Iterator[tuple[int, ...]]:
    """Their shapes alone."""
    return (shape for _, shape in named_shapes())


def moe_shapes() -> Iterator[tuple[int, ...]]:
    """Those of Qwen3-30B-A3B as transformers 5 holds them, a layer's experts in two tensors: 61 GB in bf16."""
    hidden, layers, experts, mlp, queries, keys = 2048, 48, 128, 768, 4096, 512
    yield from ((VOCAB, hidden),) * 2
    for _ in range(layers):
        yield from ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries), (128,), (128,))
        yield from ((experts, hidden), (experts, 2 * mlp, hidden), (experts, hidden, mlp), (hidden,), (hidden,))
    yield (hidden,)


def machine() -> dict[str, str]:
    """What it ran on."""
    import triton  # not where there is no GPU

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.check_output(query, text=True, timeout=60).strip().split("\n")[0].split(", ")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    return {"gpu": name, "driver": driver, **versions}
