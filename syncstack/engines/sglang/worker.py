"""The part of the SGLang adapter that lives in the scheduler process, beside the model.

Why a hook and not ``--custom-weight-loader``: such a loader returns nothing, so that neither a worker's facts nor a
failure's text would come back. SGLang's own registry of hooks wraps the one method that all updates from tensors go
through; what is not ours goes on to the method as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from syncstack.engines.layers import first_parameter, kind_of
from syncstack.engines.worker import EngineWorker
from syncstack.errors import LoadFailed, SyncstackError
from syncstack.refit.messages import ErrorReply
from syncstack.settings import Settings

CHANNEL = "syncstack"
"""The load format by which our calls are known."""

TARGET = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"

AS_LOADED = frozenset(
    {
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod",
        "sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod",
    }
)
"""Methods of layers that compute with their weights as SGLang's loader writes them."""


class SglangLoader:
    """SGLang's own ``load_weights``, from views into the parameters as they stand."""

    def __init__(self, get_model: Callable[[], Any]) -> None:
        """Raises LoadFailed for a model with layers that would have to be processed after a load."""
        self._get_model = get_model
        others = {
            kind_of(method)
            for module in get_model().modules()
            if (method := getattr(module, "quant_method", None)) is not None
        } - AS_LOADED
        if others:
            raise LoadFailed(
                "this release does not refit models with processed weights into SGLang",
                observed=", ".join(sorted(others)),
                expected="layers without quantisation and without experts",
            )

    def example(self) -> torch.Tensor | None:
        """See Loader."""
        return first_parameter(self._get_model())

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See Loader."""
        with torch.no_grad():
            self._get_model().load_weights(tensors)

    def verify(self) -> list[str]:
        """See Loader. SGLang's loaders do not say what they have loaded; the manifest was compared with the folder."""
        return []

    def recover(self) -> None:
        """See Loader. Copies leave nothing half-open."""


class Hook:
    """What is put around the method. One worker for the process, made at the first call."""

    def __init__(self) -> None:
        self._worker: EngineWorker | None = None

    def __call__(self, original: Callable[..., Any], updater: Any, *args: Any, **parts: Any) -> Any:
        """Answer our calls with JSON in place of SGLang's text; pass on all others."""
        if parts.get("load_format") != CHANNEL:
            return original(updater, *args, **parts)
        op, session, expect = parts["named_tensors"]
        try:
            if self._worker is None:
                loader = SglangLoader(updater.get_model)
                self._worker = EngineWorker(loader, settings=Settings.load(), rank=updater.tp_rank)
            reply = self._worker.call(op, session, expect)
        except SyncstackError as error:
            reply = {"error": msgspec.to_builtins(ErrorReply.of(error))}
        return True, msgspec.json.encode(reply).decode()


def run_scheduler(*args: Any, **parts: Any) -> Any:
    """SGLang's scheduler process with our hook: what its server starts in place of its own function."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, Hook(), HookType.AROUND)
    return run_scheduler_process(*args, **parts)
