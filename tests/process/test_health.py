"""docker/healthcheck on a real engine: it does not matter where that one listens; one that hangs is not healthy."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.process.conftest import REPO
from tests.process.test_refit import StartEngine

TOKEN = "a token of at least sixteen bytes"


def healthy(port: int | str, *options: str, limit_s: float = 10) -> bool:
    argv = [REPO / "docker" / "healthcheck", *options, str(port)]
    env = os.environ | {"SYNCSTACK_MODEL": "/models/x"}
    try:
        return subprocess.run(argv, env=env, check=False, timeout=limit_s).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.parametrize("listen", ["unix", "tcp://127.0.0.1:0"])
def test_an_engine_is_healthy_wherever_it_listens(start_engine: StartEngine, socket_dir: Path, listen: str) -> None:
    engine = start_engine(env={"SYNCSTACK_LISTEN": listen, "SYNCSTACK_TOKEN": TOKEN})
    assert (socket_dir / "engine-0" / "control.sock").exists() is (listen == "unix")
    port = engine.url.rpartition(":")[2]
    assert healthy(port)
    engine.kill(signal.SIGSTOP)
    begin = time.monotonic()
    assert not healthy(port)
    assert time.monotonic() - begin < 5.0  # the image gives it that long
    engine.kill(signal.SIGCONT)
    assert healthy(port)


def test_an_engine_lives_while_it_generates_or_says_why_it_must_not_yet(start_engine: StartEngine) -> None:
    engine, held = start_engine(), start_engine(name="engine-1", env={"SYNCSTACK_WAIT_FOR_REFIT": "true"})
    ports = [each.url.rpartition(":")[2] for each in (engine, held)]
    assert [healthy(port, "--generates") for port in ports] == [True, True]
    assert httpx.get(f"{engine.url}/ready").status_code == 200
    assert httpx.get(f"{held.url}/ready").status_code == 503
    engine.kill(signal.SIGSTOP)
    assert not healthy(ports[0], "--generates", limit_s=3)  # a kubelet's limit is its own
    engine.kill(signal.SIGCONT)
    assert healthy(ports[0], "--generates")


def test_nobody_is_not_healthy() -> None:
    port = free_port()
    assert not healthy(port)
    assert not healthy(port, "--generates")
