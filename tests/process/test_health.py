"""docker/healthcheck on a real engine: it does not matter where that one listens; one that hangs is not healthy."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.process.conftest import REPO
from tests.process.test_refit import StartEngine

TOKEN = "a token of at least sixteen bytes"


def healthy(port: int | str) -> bool:
    return subprocess.run([REPO / "docker" / "healthcheck", str(port)], check=False).returncode == 0


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


def test_nobody_is_not_healthy() -> None:
    assert not healthy(free_port())
