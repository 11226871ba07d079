"""Real processes: a reference engine and trainers, under real seccomp filters, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.process.warm import Warm, WarmProcess

REPO = Path(__file__).parents[2]
Process = subprocess.Popen[str] | subprocess.Popen[bytes] | WarmProcess
PROFILES = ("permissive", "restrictive")
START_S = 90.0


def make_model(folder: Path, *, hidden: int = 64, seed: int = 0) -> Path:
    """A tiny tied Llama, random but seeded, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), hidden=32)


def under(profile: str | None, argv: list[str]) -> list[str]:
    """``argv``, run under a profile without a container; None: as it is."""
    if profile is None:
        return argv
    return [sys.executable, "-m", "syncstack.cli", "seccomp", "run", str(profile_path(profile)), "--", *argv]


def profile_path(profile: str | None) -> str | None:
    """Of a profile's name; a file's path is its own."""
    return profile if profile is None or "/" in profile else str(REPO / f"seccomp/{profile}.json")


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    made = Warm(environment(tmp_path_factory.mktemp("none")))
    yield made
    made.close()


def environment(socket_dir: Path) -> dict[str, str]:
    """What a child needs; few threads, because tests share two cores."""
    return {
        **os.environ,
        "SYNCSTACK_SOCKET_DIR": str(socket_dir),
        "SYNCSTACK_ENGINE_READY_S": "60",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "HF_HUB_OFFLINE": "1",
    }


def complete(url: str, timeout: float) -> httpx.Response:
    """Have an engine complete a fixed prompt greedily."""
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 4}
    return httpx.post(url + "/v1/completions", json=body, timeout=timeout, follow_redirects=True)


def served(url: str, known: Mapping[int, Sequence[float]]) -> int | None:
    """The version that an engine answers with, None if it refuses or is not there. Its answer must be that version's
    own; ``known``: what each version that was sent answers."""
    try:
        found = complete(url, 5)
    except httpx.HTTPError:
        return None
    if found.status_code == 503:
        return None
    assert found.status_code == 200, found.text
    version = int(found.headers["x-syncstack-version"])
    assert version in known, "a version that was never sent"
    scores = found.json()["choices"][0]["logprobs"]["token_logprobs"]
    worst = max(abs(a - b) for a, b in zip(scores, known[version], strict=True))
    assert worst < 1e-4, f"{url} answers as version {version} with other weights: {worst}"
    return version


class Engine:
    """A reference engine in its own process (and process group). ``wrap`` goes before its command line."""

    def __init__(
        self,
        socket_dir: Path,
        model: Path,
        port: int,
        profile: str | None,
        slow_s: float,
        env: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
        name: str = "engine-0",
        warm: Warm | None = None,
        private: str | None = None,
    ) -> None:
        """``warm``: start it from there, unless it is wrapped; ``private`` goes with that."""
        self.url = f"http://127.0.0.1:{port}"
        self.address = f"unix:{socket_dir}/{name}"
        self.log_path = socket_dir / f"{name}.log"
        script = REPO / "tests/process/slow_engine.py"
        argv = [str(slow_s), "engine", "reference", "--model", str(model), "--port", str(port), "--name", name]
        environ = {**environment(socket_dir), **(env or {})}
        with self.log_path.open("ab") as log:
            self.process: Process
            if warm is not None and not wrap:
                path = profile_path(profile)
                self.process = WarmProcess(
                    warm, script, argv, env=environ, profile=path, private=private, stdout=log, stderr=log
                )
            else:
                self.process = subprocess.Popen(
                    [*wrap, *under(profile, [sys.executable, str(script), *argv])],
                    env=environ,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        self._await_health()

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the engine ended with {self.process.returncode}: {self.log()}")
            try:
                if httpx.get(self.url + "/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        pytest.fail(f"the engine did not start: {self.log()}")

    def log(self) -> str:
        return self.log_path.read_text()[-4000:]

    def complete(self, timeout: float = 30) -> httpx.Response:
        """Greedy log-probabilities of a fixed prompt."""
        return complete(self.url, timeout)

    def logprobs(self) -> list[float]:
        response = self.complete()
        assert response.status_code == 200, response.text
        found: list[float] = response.json()["choices"][0]["logprobs"]["token_logprobs"]
        return found

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill(signal.SIGCONT)
            self.kill()
        self.process.communicate()


@pytest.fixture
def socket_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def start_engine(socket_dir: Path, model: Path, warm: Warm) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(*, model: Path = model, profile: str | None = None, slow_s: float = 0.0, **where: Any) -> Engine:
        engines.append(Engine(socket_dir, model, free_port(), profile, slow_s, warm=warm, **where))
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture
def start_trainer(socket_dir: Path, warm: Warm) -> Iterator[Callable[..., Process]]:
    trainers: list[Process] = []

    def start(
        model: Path,
        *args: str,
        profile: str | None = None,
        address: str = f"unix:{socket_dir}/engine-0",
        env: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
        private: str | None = None,
    ) -> Process:
        script, argv = REPO / "tests/process/trainer.py", [address, str(model), *args]
        environ = {**environment(socket_dir), **(env or {})}
        if not wrap:
            path = profile_path(profile)
            trainers.append(WarmProcess(warm, script, argv, env=environ, profile=path, private=private))
            return trainers[-1]
        pipe = subprocess.PIPE
        command = [*wrap, *under(profile, [sys.executable, str(script), *argv])]
        trainers.append(
            subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        )
        return trainers[-1]

    yield start
    for trainer in trainers:
        if trainer.poll() is None:
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.communicate()
