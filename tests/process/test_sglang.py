"""A real SGLang on the CPU takes versions from a trainer, under the restrictive profile.

It needs a Python that has SGLang, which is not among this project's packages: SYNCSTACK_TEST_SGLANG_PYTHON names it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

PYTHON = os.environ.get("SYNCSTACK_TEST_SGLANG_PYTHON", "")
PORT = 18321
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON, reason="SYNCSTACK_TEST_SGLANG_PYTHON names no Python with SGLang"),
]

OPTIONS = (
    "--device=cpu", "--attention-backend=torch_native", "--context-length=256", "--max-total-tokens=4096",
    "--max-running-requests=8", "--skip-server-warmup", "--skip-tokenizer-init", "--log-level=warning",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sglang")
    cli = "from syncstack.cli import main; main()"
    engine = ["engine", "sglang", "--model", str(model), "--socket-dir", str(folder), "--port", str(PORT)]
    command = [PYTHON, "-c", cli, "seccomp", "run", "restrictive", "--", PYTHON, "-c", cli, *engine]
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--dtype", "float32", "--", *OPTIONS],
            stdout=log, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 200
    try:
        while not (folder / "engine-0" / "control.sock").exists():
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield folder
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_versions_arrive_and_the_engine_computes_with_them(model: Path, sockets: Path) -> None:
    env = {**os.environ, "SYNCSTACK_SOCKET_DIR": str(sockets)}
    script = [sys.executable, "-m", "tests.process.trainer", f"unix:{sockets}/engine-0", str(model), "3"]
    output = subprocess.run(script, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    reports = [json.loads(line) for line in output.splitlines()[1:]]
    assert [report["version"] for report in reports] == [1, 2, 3]
    assert all(report["digests_equal"] == report["tensors"] == 21 for report in reports)
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True}
    answer = httpx.post(f"http://127.0.0.1:{PORT}/generate", json=body, timeout=60)
    assert answer.headers["x-syncstack-version"] == "3"
    meta = answer.json()["meta_info"]
    for (found, *_), expected in zip(meta["output_token_logprobs"], reports[-1]["logprobs"], strict=True):
        assert math.isclose(found, expected, abs_tol=1e-4)
    assert meta["weight_version"] == "3"


@pytest.mark.parametrize("route", ["update_weights_from_disk", "pause_generation", "flush_cache"])
def test_sglangs_own_administration_is_shut(sockets: Path, route: str) -> None:
    assert httpx.post(f"http://127.0.0.1:{PORT}/{route}", json={}, timeout=30).status_code == 401
