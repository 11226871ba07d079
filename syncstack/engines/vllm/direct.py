"""Whether a vLLM model computes with exactly what its loader writes.

vLLM's layer-wise reload gives every layer new tensors, processes them as after start-up, and copies them over the old
ones: right for every layer, and four times as long on a GPU. Where no layer does anything to its weights after they are
loaded, ``model.load_weights`` alone, into the parameters as they stand, comes to the same.
"""

from __future__ import annotations

from typing import Any

import torch

from syncstack.engines.layers import kind_of

AS_LOADED = frozenset(
    {
        "vllm.model_executor.layers.linear.UnquantizedLinearMethod",
        "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod",
    }
)
"""Methods of layers that leave the weights as they were loaded, on CUDA. On the CPU they pack them."""

ATTENTION = "vllm.model_executor.layers.attention.attention.Attention"
"""The one layer whose own processing is known: it sets scales that are constants unless it is quantised."""

NOTHING = "AttentionImplBase.process_weights_after_loading"
"""The attention backends' processing where it is not theirs: an empty function."""


def computes_as_loaded(model: torch.nn.Module) -> bool:
    """Whether ``model.load_weights`` alone is enough: every layer is one of those that are known to need no more. One
    that nobody here has heard of needs more."""
    parameters = list(model.parameters())
    return (
        bool(parameters)
        and all(parameter.device.type == "cuda" for parameter in parameters)
        and all(_as_loaded(module) for module in model.modules())
    )


def _as_loaded(module: Any) -> bool:
    method = getattr(module, "quant_method", None)
    if method is not None and kind_of(method) not in AS_LOADED:
        return False
    if not hasattr(module, "process_weights_after_loading"):
        return True
    if kind_of(module) != ATTENTION or getattr(module, "quant_config", None) is not None:
        return False
    processing = getattr(type(module.impl), "process_weights_after_loading", None)
    return processing is not None and processing.__qualname__ == NOTHING
