"""The part of the vLLM adapter that lives in each worker process.

Why a worker extension and not a registered weight-transfer engine: the base class of the latter changed its
constructor and its abstract methods in 0.22, 0.25, 0.28 and 0.29, has no abort, and drops its session on an error
without undoing what was half-loaded. ``--worker-extension-cls`` has kept one contract over all these releases (methods
are added to the worker and reached by collective_rpc, whose arguments are plain data here), and leaves the transaction
to us. The loading itself uses the three functions that vLLM's own engines use: initialize_layerwise_reload,
``model.load_weights``, finalize_layerwise_reload. A direct ``load_weights`` would fail on CPU-packed layers; where
every layer computes with its weights as they were loaded (``direct``) it is enough, and takes a fourth of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from syncstack.engines.layers import first_parameter
from syncstack.engines.vllm.direct import computes_as_loaded
from syncstack.engines.worker import EngineWorker
from syncstack.settings import Settings

PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error that a kernel may show against torch's own product of the same weights, by dtype."""


PROBED_ROWS = 4096
"""Rows of a weight that are probed: a packed copy is old in all of them."""


class VllmLoader:
    """Reload of a vLLM model from views: directly into its parameters where that is enough, else layer by layer.

    The layer-wise reload keeps every incoming tensor until its layer is complete, then copies into the original
    storage. The views stay valid for that long, so nothing is cloned.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._missed: list[str] = []
        self._direct = False

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    def example(self) -> torch.Tensor | None:
        """See Loader."""
        return first_parameter(self._model)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See Loader."""
        model, runner = self._model, self._worker.model_runner
        wanted = {name for name, _ in model.named_parameters()}
        self._direct = computes_as_loaded(model)
        if self._direct:
            with torch.no_grad():
                loaded = model.load_weights(tensors)
        else:
            loaded = self._reload(model, tensors)
        # A loader that does not say what it loaded cannot be checked this way; vLLM's own check skips it too.
        self._missed = [] if loaded is None else sorted(wanted - set(loaded))
        for hook in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            if hasattr(runner, hook):
                getattr(runner, hook)()

    def _reload(self, model: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str] | None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(model)
        loaded: set[str] | None = model.load_weights(tensors)
        finalize_layerwise_reload(model, self._worker.model_config)
        for module in _tied_modules(model).values():
            # The reload processes only layers that were given weights of their own. A tied head was given none, and
            # on the CPU it goes on multiplying with the packed copy that it made of the old ones.
            module.quant_method.process_weights_after_loading(module)
        return loaded

    def verify(self) -> list[str]:
        """See Loader. Also names tied layers that compute with other weights than they hold."""
        if self._direct:
            return self._missed  # nothing here has a copy of its weights
        stale = [name for name, module in _tied_modules(self._model).items() if not _computes_with_its_weight(module)]
        return [*self._missed, *(f"{name} (its packed copy is stale)" for name in stale)]

    def recover(self) -> None:
        """See Loader. Finalizing processes the half-loaded layers and resets their book-keeping."""
        if self._direct:
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._worker.model_config)


def _tied_modules(model: Any) -> dict[str, Any]:
    """Modules whose weight belongs to another module (a tied output head), by the weight's second name."""
    own = {name for name, _ in model.named_parameters()}
    tied = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own]
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in tied}
    return {name: module for name, module in modules.items() if getattr(module, "quant_method", None) is not None}


def _computes_with_its_weight(module: Any) -> bool:
    """Multiply a fixed vector through the layer's kernel and through torch, and compare."""
    weight = module.weight
    if weight.ndim != 2 or not weight.numel():
        return True
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, weight.shape[1], generator=generator).to(device=weight.device, dtype=weight.dtype)
    with torch.inference_mode():
        found = module.quant_method.apply(module, probe).float()[:, :PROBED_ROWS]
        expected = torch.nn.functional.linear(probe.float(), weight[:PROBED_ROWS].float())
    error = (found - expected).norm() / expected.norm().clamp_min(1e-30)
    return bool(error <= PROBE_TOLERANCE.get(weight.dtype, 2e-2))


class SyncstackWorker:
    """vLLM adds this to its worker's bases: the names must not clash with any of the worker's own."""

    def syncstack_call(self, op: str, session: str = "", expect: str = "") -> dict[str, Any]:
        """Run one operation (see ``engines/worker.py``). The first call opens the data socket.

        Lazily, because the hook for extensions (``init_worker_extension``) came only with 0.33.
        """
        worker: EngineWorker | None = self.__dict__.get("_syncstack")
        if worker is None:
            settings = Settings.load()
            rank: int = self.rank  # type: ignore[attr-defined]
            worker = EngineWorker(VllmLoader(self), settings=settings, rank=rank)
            self.__dict__["_syncstack"] = worker
        return worker.call(op, session, expect)
