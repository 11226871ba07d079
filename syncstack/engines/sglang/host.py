"""The part of the SGLang adapter that lives in SGLang's server process: its tokenizer manager as an EngineHost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from syncstack.engines.sglang.worker import CHANNEL
from syncstack.errors import LoadFailed, UsageError
from syncstack.settings import PauseMode, Settings
from syncstack.weights.checkpoint import read_metas
from syncstack.weights.meta import ParamMeta


class SglangHost:
    """See EngineHost. One scheduler process: tensor parallelism of 1."""

    kind = "sglang"

    def __init__(self, manager: Any, settings: Settings) -> None:
        import sglang

        config = manager.model_config
        self.kind_version: str = sglang.__version__
        self.model = str(config.model_path)
        self.dtype = str(config.dtype).removeprefix("torch.")
        self.tensors: tuple[ParamMeta, ...] = read_metas(
            Path(self.model), dtype=self.dtype if settings.wire_dtype == "engine" else None
        )
        self._manager = manager

    async def call_workers(self, op: str, session: str, expect: str, deadline_s: float) -> list[dict[str, Any]]:
        """See EngineHost. The scheduler takes it between two batches, by the road of SGLang's own weight updates.

        Not by the tokenizer manager's method, which would hold new requests up while the engine serves. The call is
        never cancelled, because SGLang takes a reply for the answer to whatever waits: late, it still finds its own.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize([op, session, expect])],
            load_format=CHANNEL,
            flush_cache=False,
            disable_draft_model=True,
        )
        self._manager.auto_create_handle_loop()
        call = asyncio.ensure_future(self._manager.update_weights_from_tensor_communicator(request))
        replies = await asyncio.wait_for(asyncio.shield(call), deadline_s)
        return [_said(reply) for reply in replies]

    async def pause(self, mode: PauseMode) -> None:
        """See EngineHost. With ``wait`` the gate has let everything out: what is aborted then has lost its client."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode == "keep":
            raise UsageError(
                "SGLang drops no cache while requests are held over an update",
                consequence="Nothing was stopped",
                next_step="set SYNCSTACK_PAUSE_MODE to wait or abort",
            )
        await self._manager.pause_generation(PauseGenerationReqInput(mode="abort"))

    async def publish(self, version: int) -> None:
        """See EngineHost. Only an explicit success of the cache's flush counts."""
        flushed = await self._manager.flush_cache()
        if flushed.success is not True:
            raise LoadFailed("SGLang did not flush its cache", observed=flushed.message or repr(flushed.success))
        if hasattr(self._manager, "update_weight_version"):  # 0.5.20: the scheduler keeps it too
            from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

            request = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
            await self._manager.update_weight_version(request)
        else:
            self._manager._update_weight_version_if_provided(str(version))

    async def resume(self) -> None:
        """See EngineHost."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


def _said(reply: Any) -> dict[str, Any]:
    if not reply.success:
        raise LoadFailed("SGLang's scheduler refused a call", observed=reply.message)
    found: dict[str, Any] = msgspec.json.decode(reply.message)
    return found
