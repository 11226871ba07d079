"""The part of the vLLM adapter that lives in vLLM's API server process.

An endpoint plugin (entry-point group ``vllm.endpoint_plugins``, loaded only when VLLM_PLUGINS names it): vLLM hands it
the application and the engine client, which is all that is needed. vLLM's own dev-mode routes, which would let
anybody who reaches the port write weights, stay off.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from syncstack.engines.host import start_control
from syncstack.errors import LoadFailed, UsageError
from syncstack.refit.gate import Gate
from syncstack.refit.state import EngineState
from syncstack.settings import PauseMode, Settings
from syncstack.weights.checkpoint import read_metas
from syncstack.weights.meta import ParamMeta

log = logging.getLogger(__name__)

TESTED_WITH = ("0.32.0", "0.26.0")
"""vLLM releases that the tests of this release ran against: the first on the CPU in CI, the second on a GPU."""


class VllmHost:
    """vLLM's engine client as an EngineHost."""

    kind = "vllm"

    def __init__(self, client: Any, settings: Settings) -> None:
        import vllm

        parallel = client.vllm_config.parallel_config
        for option in ("data_parallel_size", "_api_process_count"):
            if getattr(parallel, option, 1) > 1:
                raise UsageError(
                    f"vLLM was started with {option.strip('_')} {getattr(parallel, option)}",
                    expected="1: this release reaches one engine and one API server only",
                    next_step="start one engine for each replica, with a --name of its own",
                )
        model_config = client.vllm_config.model_config
        self.kind_version: str = vllm.__version__
        self.model: str = str(model_config.model)
        self.dtype = str(model_config.dtype).removeprefix("torch.")
        self.tensors: tuple[ParamMeta, ...] = read_metas(
            Path(self.model), dtype=self.dtype if settings.wire_dtype == "engine" else None
        )
        self._client = client
        self._mode: PauseMode = "wait"
        self._pausing: asyncio.Future[None] | None = None

    async def call_workers(self, op: str, session: str, expect: str, deadline_s: float) -> list[dict[str, Any]]:
        """See EngineHost. vLLM runs a collective_rpc between two engine steps, on every worker.

        vLLM's own timeout stays off: with several workers it leaves the late reply in the queue, and every later call
        reads the answer to the one before it. Ours only stops waiting; vLLM matches late replies by their id.
        """
        async with asyncio.timeout(deadline_s):
            replies: list[dict[str, Any]] = await self._client.collective_rpc(
                "syncstack_call", args=(op, session, expect)
            )
        return replies

    async def pause(self, mode: PauseMode) -> None:
        """See EngineHost.

        vLLM sleeps 20 ms after its scheduler has paused, to let the last answers out. With ``wait`` the gate has seen
        them out already: the scheduler's own word is enough, and the sleep goes on beside the load.
        """
        self._mode = mode
        self._pausing = asyncio.ensure_future(self._client.pause_generation(mode=mode, clear_cache=mode != "keep"))
        try:
            if mode == "wait":
                while not self._pausing.done():
                    await asyncio.sleep(0)  # its call goes out before ours
                    if await self._client.is_paused():
                        return
            await self._pausing
        except BaseException:
            self._pausing.cancel()
            self._pausing = None
            raise

    async def _paused(self) -> None:
        """Wait for a pause to have come to its end: requests whose clients went away have left the engine too."""
        pausing, self._pausing = self._pausing, None
        if pausing is not None and not pausing.cancelled():
            await pausing

    async def publish(self, version: int) -> None:
        """See EngineHost. Only an explicit success of the cache's reset counts."""
        await self._paused()
        # Frozen requests hold blocks that old weights filled: they are preempted and computed anew.
        done = await self._client.reset_prefix_cache(reset_running_requests=self._mode == "keep")
        if done is not True:
            raise LoadFailed("vLLM did not reset its prefix cache", observed=repr(done), expected="True")
        if hasattr(self._client, "update_weight_version"):
            await self._client.update_weight_version(str(version))

    async def resume(self) -> None:
        """See EngineHost."""
        await self._paused()
        await self._client.resume_generation()


class SyncstackEndpoint:
    """vLLM's EndpointPlugin protocol."""

    name = "syncstack"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._state = EngineState()
        self._task: asyncio.Task[None] | None = None

    def attach_router(self, app: Any) -> None:
        """Put the gate before every route of vLLM's server. Adds no route of our own to its port."""
        app.add_middleware(Gate, state=self._state)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start the control endpoint once the engine is up."""
        del state, args
        settings = Settings.load()
        host = VllmHost(engine_client, settings)
        if not host.kind_version.startswith(TESTED_WITH):
            log.warning("vLLM %s was not tested; tested: %s", host.kind_version, ", ".join(TESTED_WITH))
        self._task = await start_control(host, self._state, settings)


def endpoint_plugin() -> SyncstackEndpoint:
    """Entry point of ``vllm.endpoint_plugins``."""
    return SyncstackEndpoint()
