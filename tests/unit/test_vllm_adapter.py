"""The parts of the vLLM adapter that need no vLLM. The real engine is exercised in tests/compose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from syncstack.engines.vllm.launch import command, environment
from syncstack.engines.vllm.worker import SyncstackWorker, VllmLoader
from syncstack.errors import UsageError


class PackedMethod:
    """What vLLM does with a head on the CPU: packs the weight once and multiplies with the packed copy."""

    def process_weights_after_loading(self, module: torch.nn.Module) -> None:
        module.packed = module.weight.detach().clone()

    def apply(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(module.packed, torch.Tensor)
        return torch.nn.functional.linear(x, module.packed)


class Tied(torch.nn.Module):
    """An embedding and a head that share one parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16, dtype=dtype)
        self.head = torch.nn.Linear(16, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.head.quant_method = PackedMethod()
        self.head.quant_method.process_weights_after_loading(self.head)


class Worker:
    """As much of vLLM's worker as the loader's check touches."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model_runner = self
        self._model = model

    def get_model(self) -> torch.nn.Module:
        return self._model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_that_kept_its_old_packed_copy_is_refused(dtype: torch.dtype) -> None:
    """vLLM 0.32's layer-wise reload on the CPU leaves it so: embeddings new, head old, and no error."""
    model = Tied(dtype)
    loader = VllmLoader(Worker(model))
    assert loader.verify() == []
    with torch.no_grad():
        model.embed.weight.mul_(1.1)
    assert loader.verify() == ["head.weight (its packed copy is stale)"]
    model.head.quant_method.process_weights_after_loading(model.head)
    assert loader.verify() == []


def test_the_extension_adds_one_name_to_vllms_worker() -> None:
    assert [name for name in vars(SyncstackWorker) if not name.startswith("__")] == ["syncstack_call"]


def test_the_server_is_started_with_our_plugins_and_no_others_are_lost() -> None:
    env = environment({"VLLM_PLUGINS": "theirs", "X": "y"}, name="e", socket_dir=Path("/run/s"))
    assert env == {
        "VLLM_PLUGINS": "theirs,syncstack",  # and nobody else's: the user chose
        "X": "y",
        "SYNCSTACK_ENGINE_NAME": "e",
        "SYNCSTACK_SOCKET_DIR": "/run/s",
    }
    argv = command(model=Path("/m"), host="::", port=1, dtype="bfloat16", extra=["--max-num-seqs", "4"])
    assert argv[-2:] == ["--max-num-seqs", "4"]
    assert "syncstack.engines.vllm.worker.SyncstackWorker" in argv


@pytest.mark.parametrize("variable", ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"])
def test_unsafe_doors_are_refused(variable: str) -> None:
    with pytest.raises(UsageError, match=variable):
        environment({variable: "1"}, name="e", socket_dir=Path("/run/s"))
    environment({variable: "0"}, name="e", socket_dir=Path("/run/s"))
