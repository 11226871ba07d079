"""Bad input to the command line: one clear line, exit 2, nothing started."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from syncstack import EngineClient, Settings
from syncstack.errors import EngineNotReady, SettingsError, UsageError
from tests.process.conftest import environment


def cli(socket_dir: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "syncstack.cli", *args],
        env=environment(socket_dir),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_refused(result: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    for text in texts:
        assert text in errors[0]


@pytest.mark.parametrize("kind", ["vllm", "reference"])
class TestEngine:
    def test_a_folder_without_config(self, socket_dir: Path, tmp_path: Path, kind: str) -> None:
        result = cli(socket_dir, "engine", kind, "--model", str(tmp_path))
        assert_refused(result, "has no config.json", "Next: ")
        assert list(socket_dir.iterdir()) == []

    def test_a_port_that_is_taken(self, socket_dir: Path, model: Path, kind: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            assert_refused(cli(socket_dir, "engine", kind, "--model", str(model), "--port", port), f"port {port}")

    def test_a_socket_folder_that_is_not_there(self, tmp_path: Path, model: Path, kind: str) -> None:
        result = cli(tmp_path / "nowhere", "engine", kind, "--model", str(model))
        assert_refused(result, "socket folder", "mount one volume at SYNCSTACK_SOCKET_DIR")

    def test_a_name_that_leaves_the_folder(self, socket_dir: Path, model: Path, kind: str) -> None:
        assert_refused(cli(socket_dir, "engine", kind, "--model", str(model), "--name", "../x"), "engine_name")


def test_vllms_unsafe_doors_stay_shut(socket_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert_refused(cli(socket_dir, "engine", "vllm", "--model", str(model)), "VLLM_SERVER_DEV_MODE=1")


def test_an_engine_that_never_comes_is_a_deadline(socket_dir: Path) -> None:
    settings = Settings.load(socket_dir=socket_dir, engine_ready_s=0.5)
    with pytest.raises(EngineNotReady, match=r"did not become ready within 0\.5 s"):
        EngineClient.connect(f"unix:{socket_dir}/engine-0", settings=settings)


def test_a_folder_that_is_not_shared_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mount the volume that the engine uses"):
        EngineClient.connect(f"unix:{tmp_path}/nowhere/engine-0", settings=Settings.load())


def test_an_address_of_another_form_is_refused() -> None:
    with pytest.raises(UsageError, match="expected: unix:"):
        EngineClient.connect("http://x:1", settings=Settings.load())


def test_a_bad_setting_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCSTACK_LOAD_S", "-1")
    with pytest.raises(SettingsError, match="set SYNCSTACK_LOAD_S"):
        Settings.load()
