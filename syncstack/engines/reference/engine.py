"""A small plain-torch engine with the same control endpoint as the real ones.

It exists for tests and as documentation of what an adapter must do. It generates with transformers, one request at a
time, and implements just enough of the OpenAI completions route for a test to see which weights are in. It is not
meant to serve anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from syncstack.engines.host import start_control
from syncstack.engines.worker import EngineWorker
from syncstack.refit.gate import Gate
from syncstack.refit.state import EngineState
from syncstack.settings import PauseMode, Settings
from syncstack.weights.checkpoint import read_metas


class ReferenceLoader:
    """Copies checkpoint tensors into a transformers model, in place. One tied parameter counts for all its names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._state = model.state_dict(keep_vars=True)
        self._filled: set[int] = set()

    def example(self) -> torch.Tensor | None:
        """See Loader."""
        return next(iter(self._state.values()), None)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See Loader."""
        self._filled.clear()
        with torch.no_grad():
            for name, tensor in tensors:
                target = self._state[name]
                target.data.copy_(tensor)
                self._filled.add(target.data_ptr())

    def verify(self) -> list[str]:
        """See Loader."""
        return [name for name, tensor in self._state.items() if tensor.data_ptr() not in self._filled]

    def recover(self) -> None:
        """See Loader. Copies leave nothing half-open."""


class ReferenceHost:
    """The engine: a model, a worker in this process, and a lock that pausing takes."""

    kind = "reference"
    kind_version = "1"

    def __init__(self, folder: Path, dtype: str, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM

        self.model = str(folder)
        self.dtype = dtype
        self.tensors = read_metas(folder, dtype=dtype if settings.wire_dtype == "engine" else None)
        # Safetensors only: the other format of such a folder is a pickle.
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True)
        self._module = loaded.eval()
        self._worker = EngineWorker(ReferenceLoader(self._module), settings=settings, rank=0)
        self._busy = asyncio.Lock()
        self._paused = False

    async def call_workers(self, op: str, session: str, expect: str, deadline_s: float) -> list[dict[str, Any]]:
        """See EngineHost."""
        async with asyncio.timeout(deadline_s):
            return [await asyncio.to_thread(self._worker.call, op, session, expect)]

    async def pause(self, mode: PauseMode) -> None:
        """See EngineHost. There is one request at a time: every mode waits for it."""
        del mode
        if not self._paused:
            await self._busy.acquire()
            self._paused = True

    async def publish(self, version: int) -> None:
        """See EngineHost. There are no caches."""

    async def resume(self) -> None:
        """See EngineHost."""
        if self._paused:
            self._paused = False
            self._busy.release()

    async def complete(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and their log-probabilities."""
        async with self._busy:
            return await asyncio.to_thread(self._complete, prompt, max_tokens)

    def _complete(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        ids, logprobs = list(prompt), []
        with torch.inference_mode():
            for _ in range(max_tokens):
                logits = self._module(input_ids=torch.tensor([ids])).logits[0, -1].float()
                scores = torch.log_softmax(logits, dim=-1)
                ids.append(int(scores.argmax()))
                logprobs.append(float(scores[ids[-1]]))
        return ids[len(prompt) :], logprobs


class Completion(msgspec.Struct):
    """The part of the OpenAI request that is understood: token ids in, greedy tokens out."""

    prompt: list[int]
    max_tokens: int = 1


def build_app(folder: Path, dtype: str, settings: Settings) -> Starlette:
    """The engine's server application; the model is loaded when it starts."""
    state = EngineState()
    hosts: list[ReferenceHost] = []

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        hosts.append(await asyncio.to_thread(ReferenceHost, folder, dtype, settings))
        task = await start_control(hosts[0], state, settings)
        yield
        task.cancel()

    async def health(_: Request) -> Response:
        return Response(status_code=200)

    async def completions(request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await request.body(), type=Completion)
        except msgspec.DecodeError as error:
            return JSONResponse({"error": {"message": str(error), "code": 400}}, status_code=400)
        tokens, logprobs = await hosts[0].complete(wanted.prompt, wanted.max_tokens)
        return JSONResponse({"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}]})

    app = Starlette(
        routes=[Route("/health", health), Route("/v1/completions", completions, methods=["POST"])], lifespan=lifespan
    )
    app.add_middleware(Gate, state=state)
    return app


def serve(*, model: Path, host: str, port: int, dtype: str, settings: Settings) -> None:
    """Run until a signal ends it; SIGTERM is no failure."""
    import uvicorn

    from syncstack.engines.host import check_port
    from syncstack.engines.listen import claim

    read_metas(model)
    settings = claim(settings)
    check_port(host, port)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it once more when it has shut down
    uvicorn.run(build_app(model, dtype, settings), host=host, port=port, access_log=False, log_config=None)
