"""The parts of the SGLang adapter that need no SGLang. The real engine: tests/process/test_sglang.py."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from syncstack.engines.launch import environment
from syncstack.engines.sglang.host import SglangHost
from syncstack.engines.sglang.launch import command
from syncstack.engines.sglang.serve import ONLY, Front, check
from syncstack.engines.sglang.worker import CHANNEL, Hook, SglangLoader
from syncstack.errors import LoadFailed, UsageError
from syncstack.refit.gate import Message, Receive, Scope, Send
from syncstack.settings import Settings


class Request:
    """Any of SGLang's request types."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of SGLang as the host imports."""
    names = ("UpdateWeightsFromTensorReqInput", "PauseGenerationReqInput", "ContinueGenerationReqInput")
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    structs = ModuleType("sglang.srt.managers.io_struct")
    for name in (*names, "UpdateWeightVersionReqInput"):
        setattr(structs, name, type(name, (Request,), {}))
    utils: Any = ModuleType("sglang.srt.utils")
    utils.MultiprocessingSerializer = SimpleNamespace(serialize=list)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)


class Manager:
    """SGLang's tokenizer manager: one call at a time is answered, in order, when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.answers: list[asyncio.Future[Any]] = []
        self.flushed = SimpleNamespace(success=True, message="")
        self.version = ""

    def auto_create_handle_loop(self) -> None: ...

    async def update_weights_from_tensor_communicator(self, request: Request) -> list[Any]:
        self.asked.append(request)
        self.answers.append(asyncio.get_running_loop().create_future())
        return [await self.answers[-1]]

    async def pause_generation(self, request: Request) -> None:
        self.asked.append(request)

    async def continue_generation(self, request: Request) -> None:
        self.asked.append(request)

    async def flush_cache(self) -> Any:
        return self.flushed

    def _update_weight_version_if_provided(self, version: str) -> None:
        self.version = version


def host(manager: Manager) -> SglangHost:
    made = SglangHost.__new__(SglangHost)
    made._manager = manager
    return made


def said(**parts: Any) -> Any:
    return SimpleNamespace(success=True, message=msgspec.json.encode(parts).decode())


def test_a_call_that_is_given_up_is_not_taken_for_the_answer_to_the_next(sglang: None) -> None:
    async def run() -> None:
        manager = Manager()
        engine = host(manager)
        with pytest.raises(TimeoutError):
            await engine.call_workers("load", "s1", "e", 0.05)
        later = asyncio.ensure_future(engine.call_workers("verify", "s2", "e", 5))
        await asyncio.sleep(0.01)
        manager.answers[0].set_result(said(load_s=1))
        manager.answers[1].set_result(said(tensors=7))
        assert await later == [{"tensors": 7}]
        assert [request.serialized_named_tensors for request in manager.asked] == [
            [["load", "s1", "e"]],
            [["verify", "s2", "e"]],
        ]
        assert {(request.load_format, request.flush_cache) for request in manager.asked} == {(CHANNEL, False)}

    asyncio.run(run())


def test_a_refusal_of_the_scheduler_is_an_error(sglang: None) -> None:
    async def run() -> None:
        manager = Manager()
        call = asyncio.ensure_future(host(manager).call_workers("info", "", "", 5))
        await asyncio.sleep(0.01)
        manager.answers[0].set_result(SimpleNamespace(success=False, message="no"))
        with pytest.raises(LoadFailed, match="refused a call .observed: no"):
            await call

    asyncio.run(run())


def test_pause_publish_and_resume(sglang: None) -> None:
    async def run() -> None:
        manager = Manager()
        engine = host(manager)
        with pytest.raises(UsageError, match="set SYNCSTACK_PAUSE_MODE to wait or abort"):
            await engine.pause("keep")
        assert manager.asked == []
        await engine.pause("wait")
        await engine.publish(4)
        await engine.resume()
        assert [type(request).__name__ for request in manager.asked] == [
            "PauseGenerationReqInput",
            "ContinueGenerationReqInput",
        ]
        assert manager.version == "4"
        manager.flushed = SimpleNamespace(success=False, message="requests are running")
        with pytest.raises(LoadFailed, match="requests are running"):
            await engine.publish(5)
        assert manager.version == "4"

    asyncio.run(run())


def test_d34_a_new_version_number_aborts_no_request(sglang: None) -> None:
    """SGLang 0.5.20's call for it aborts all of them unless it is told not to."""

    class Newer(Manager):
        running = 16

        async def update_weight_version(self, request: Request) -> None:
            self.version = request.__dict__["new_version"]
            if request.__dict__.get("abort_all_requests", True):
                self.running = 0

    async def run() -> None:
        manager = Newer()
        await host(manager).publish(4)
        assert (manager.version, manager.running) == ("4", 16)

    asyncio.run(run())


# --- the scheduler's side


class Model(torch.nn.Module):
    """A model with a loader as SGLang's are."""

    def __init__(self, method: object = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        if method is not None:
            self.layer.quant_method = method

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


def method(name: str) -> object:
    module, _, kind = f"sglang.srt.layers.quantization.{name}".rpartition(".")
    return type(kind, (), {"__module__": module})()


def test_the_loader_writes_in_place_and_refuses_layers_that_process_their_weights() -> None:
    model = Model(method("unquant.UnquantizedLinearMethod"))
    address = model.layer.weight.data_ptr()
    loader = SglangLoader(lambda: model)
    loader.load(iter([("layer.weight", torch.ones(2, 3)), ("layer.bias", torch.ones(2))]))
    assert model.layer.weight.sum() == 6
    assert (model.layer.weight.data_ptr(), loader.verify()) == (address, [])
    example = loader.example()
    assert example is not None
    assert example.data_ptr() == address
    with pytest.raises(LoadFailed, match=r"does not refit models with processed weights .*fp8.Fp8LinearMethod"):
        SglangLoader(lambda: Model(method("fp8.Fp8LinearMethod")))


def test_the_hook_answers_ours_and_passes_on_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "engine-0").mkdir(mode=0o700)
    monkeypatch.setenv("SYNCSTACK_SOCKET_DIR", str(tmp_path))
    updater = SimpleNamespace(get_model=Model, tp_rank=0)
    passed: list[Any] = []

    def original(*args: Any, **parts: Any) -> tuple[bool, str]:
        passed.append((args, parts))
        return True, "Success"

    hook = Hook()
    assert hook(original, updater, named_tensors=[], load_format=None) == (True, "Success")
    assert passed == [((updater,), {"named_tensors": [], "load_format": None})]
    success, text = hook(original, updater, named_tensors=["info", "", ""], load_format=CHANNEL)
    assert success
    assert msgspec.json.decode(text)["socket"] == "worker-0.sock"
    success, text = hook(original, updater, named_tensors=["load", "unknown", ""], load_format=CHANNEL)
    assert success
    assert "no staged version" in msgspec.json.decode(text)["error"]["what"]
    assert len(passed) == 1
    assert hook._worker is not None
    hook._worker.close()


def test_a_model_that_cannot_be_refitted_is_told_to_the_server() -> None:
    updater = SimpleNamespace(get_model=lambda: Model(method("fp8.Fp8LinearMethod")), tp_rank=0)
    success, text = Hook()(print, updater, named_tensors=["info", "", ""], load_format=CHANNEL)
    assert success
    assert "processed weights" in msgspec.json.decode(text)["error"]["what"]


# --- the server's side


def test_what_this_release_does_not_refit_is_not_started() -> None:
    check(SimpleNamespace(**ONLY))
    check(SimpleNamespace())  # an option that a release does not have
    for option, found in {"tp_size": 2, "speculative_algorithm": "EAGLE", "weight_cache_mode": "client"}.items():
        with pytest.raises(UsageError, match=f"started with {option} {found}"):
            check(SimpleNamespace(**ONLY | {option: found}))


def test_the_control_endpoint_starts_before_the_server_says_that_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
        else:
            told.append("served")

    async def started(self: Front) -> None:
        told.append("control")

    async def send(message: Message) -> None:
        told.append(message["type"])

    async def nothing() -> Message:
        return {}

    async def run() -> AsyncIterator[None]:
        front = Front(app, Settings())
        await front({"type": "http", "path": "/generate", "headers": []}, nothing, send)
        told.append("--")
        await front({"type": "lifespan"}, nothing, send)
        yield

    monkeypatch.setattr(Front, "_start", started)
    asyncio.run(_last(run()))
    assert told == ["http.response.start", "http.response.body", "--", "control", "lifespan.startup.complete"]


async def _last(steps: AsyncIterator[None]) -> None:
    async for _ in steps:
        pass


def test_the_command_line_and_the_environment() -> None:
    argv = command(model=Path("/m"), host="::", port=1, dtype="bfloat16", extra=["--mem-fraction-static", "0.3"])
    assert argv[1:4] == ["-m", "syncstack.engines.sglang.serve", "--model-path"]
    assert argv[-2:] == ["--mem-fraction-static", "0.3"]
    assert environment({"X": "y"}, name="e", socket_dir=Path("/run/s")) == {
        "X": "y",
        "SYNCSTACK_ENGINE_NAME": "e",
        "SYNCSTACK_SOCKET_DIR": "/run/s",
    }
