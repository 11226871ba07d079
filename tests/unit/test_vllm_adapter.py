"""The parts of the vLLM adapter that need no vLLM. The real engine is exercised in tests/compose."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from syncstack.engines.vllm import launch
from syncstack.engines.vllm.direct import ATTENTION, NOTHING, computes_as_loaded
from syncstack.engines.vllm.launch import check_plugin, command, environment
from syncstack.engines.vllm.plugin import VllmHost
from syncstack.engines.vllm.worker import SyncstackWorker, VllmLoader
from syncstack.errors import LoadFailed, UsageError


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
def test_e04_unsafe_doors_are_refused(variable: str) -> None:
    with pytest.raises(UsageError, match=variable):
        environment({variable: "1"}, name="e", socket_dir=Path("/run/s"))
    environment({variable: "0"}, name="e", socket_dir=Path("/run/s"))


def vllm_class(name: str, *bases: type, **attributes: object) -> type:
    """A class that is called as one of vLLM's."""
    module, _, qualname = name.rpartition(".")
    return type(qualname, bases, {"__module__": module, **attributes})


LINEAR = vllm_class("vllm.model_executor.layers.linear.UnquantizedLinearMethod")
FP8 = vllm_class("vllm.model_executor.layers.quantization.fp8.Fp8LinearMethod")


class AttentionImplBase:
    """As vLLM's: nothing to do."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...


class Busy(AttentionImplBase):
    """A backend with something of its own to do."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...


class Processed(torch.nn.Module):
    """Any layer that does something to its weights."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...


def on_gpu(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Its parameters say that they lie on a GPU. There is none here."""
    fake = [SimpleNamespace(device=torch.device("cuda")) for _ in model.parameters()]
    monkeypatch.setattr(model, "parameters", lambda: iter(fake))
    return model


def model_with(*, method: object = None, attention: type = AttentionImplBase, layer: torch.nn.Module | None = None):  # type: ignore[no-untyped-def]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), vllm_class(ATTENTION, Processed)())
    model[0].quant_method = method or LINEAR()
    model[1].impl = attention()
    if layer is not None:
        model.append(layer)
    return model


def test_a_model_is_loaded_directly_only_if_every_layer_is_known_to_compute_as_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    AttentionImplBase.process_weights_after_loading.__qualname__ = NOTHING
    assert computes_as_loaded(on_gpu(model_with(), monkeypatch))
    assert not computes_as_loaded(model_with())  # on the CPU the same layers pack their weights
    assert not computes_as_loaded(on_gpu(model_with(method=FP8()), monkeypatch))
    assert not computes_as_loaded(on_gpu(model_with(attention=Busy), monkeypatch))
    assert not computes_as_loaded(on_gpu(model_with(layer=Processed()), monkeypatch))
    quantised = model_with()
    quantised[1].quant_config = object()
    assert not computes_as_loaded(on_gpu(quantised, monkeypatch))
    assert not computes_as_loaded(torch.nn.Sequential())


def test_d19_d27_a_direct_load_fills_the_parameters_in_place_and_names_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))

        def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            done = set()
            for name, tensor in tensors:
                getattr(self, name).data.copy_(tensor)
                done.add(name)
            return done

    monkeypatch.setattr("syncstack.engines.vllm.worker.computes_as_loaded", lambda model: True)
    model = Model()
    address = model.a.data_ptr()
    loader = VllmLoader(Worker(model))
    loader.load(iter([("a", torch.ones(3)), ("b", torch.ones(2))]))
    assert loader.verify() == []
    loader.load(iter([("a", torch.full((3,), 2.0))]))
    assert loader.verify() == ["b"]
    assert (model.a.data_ptr(), model.a.tolist()) == (address, [2.0, 2.0, 2.0])
    loader.recover()
    example = loader.example()
    assert example is not None
    assert example.data_ptr() == address


class Client:
    """As much of vLLM's engine client as a pause touches: a scheduler that drains, and the sleep after it."""

    def __init__(self, *, drained: bool = True, sleep_s: float = 5.0) -> None:
        self.paused = self.slept = self.resumed = False
        self.reset: object = None
        self.calls: list[str] = []
        self._drained = drained
        self._sleep_s = sleep_s
        parallel = SimpleNamespace(data_parallel_size=1, _api_process_count=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")
        await asyncio.sleep(0)
        if not self._drained:
            await asyncio.sleep(3600)
        self.paused = True
        await asyncio.sleep(self._sleep_s)
        self.slept = True

    async def is_paused(self) -> bool:
        await asyncio.sleep(0)
        return self.paused

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> object:
        self.calls.append("reset")
        return self.slept if self.reset is None else self.reset

    async def resume_generation(self) -> None:
        self.calls.append("resume")


def host(client: Client) -> VllmHost:
    made = VllmHost.__new__(VllmHost)
    made._client, made._mode, made._pausing = client, "wait", None
    return made


def test_a_pause_returns_when_the_scheduler_has_paused_and_what_follows_waits_for_its_end() -> None:
    async def run() -> None:
        client = Client(sleep_s=0.1)
        engine = host(client)
        begin = time.monotonic()
        await engine.pause("wait")
        assert client.paused
        assert not client.slept
        assert time.monotonic() - begin < 0.09
        await engine.publish(1)  # raises unless the pause has come to its end
        await engine.resume()
        assert client.calls == ["pause wait True", "reset", "resume"]

    asyncio.run(run())


@pytest.mark.parametrize("answer", [False, 1, 204, "ok", {"todo": True}])
def test_d32_only_an_explicit_success_of_the_caches_reset_counts(answer: object) -> None:
    async def run() -> None:
        client = Client(sleep_s=0.0)
        engine = host(client)
        await engine.pause("wait")
        client.reset = answer
        with pytest.raises(LoadFailed, match="did not reset its prefix cache"):
            await engine.publish(1)

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_other_pauses_are_waited_for_to_their_end(mode: Literal["abort", "keep"]) -> None:
    async def run() -> None:
        client = Client(sleep_s=0.01)
        await host(client).pause(mode)
        assert client.slept
        assert client.calls == [f"pause {mode} {mode != 'keep'}"]

    asyncio.run(run())


def test_a_pause_that_is_given_up_is_not_waited_for_when_the_engine_resumes() -> None:
    async def run() -> None:
        client = Client(drained=False)
        engine = host(client)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.pause("wait")
        await asyncio.wait_for(engine.resume(), 1)
        assert client.calls == ["pause wait True", "resume"]

    asyncio.run(run())


def test_a_package_without_its_metadata_is_refused_before_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with its folder on PYTHONPATH: vLLM would start without what answers a trainer, and say nothing."""
    check_plugin()
    monkeypatch.setattr(launch, "entry_points", lambda *, group: ())
    with pytest.raises(UsageError, match=r"no entry point syncstack in vllm\.endpoint_plugins; .*was not started"):
        check_plugin()
