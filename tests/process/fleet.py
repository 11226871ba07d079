"""Two reference engines that share nothing with their trainer but TCP, and the trainer: three real processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any

from syncstack import EngineClient, Settings
from syncstack.refit.state import StateReport
from tests.ports import free_port
from tests.process.conftest import REPO, Engine, environment, profile_path, served
from tests.process.warm import Warm, WarmProcess

TOKEN = "0123456789abcdef" * 4
WATCHDOG_S = 30.0
"""Longer than anything may take. A refit that has not ended by then hangs."""

DEADLINES = {
    "SYNCSTACK_LINK_S": "6", "SYNCSTACK_CONTROL_S": "5", "SYNCSTACK_LOAD_S": "4", "SYNCSTACK_PAUSE_S": "4",
    "SYNCSTACK_HEARTBEAT_S": "0.2", "SYNCSTACK_STALL_S": "3", "SYNCSTACK_ENGINE_READY_S": "20",
}  # fmt: skip


class Member:
    """One engine: its process, and what it is asked."""

    def __init__(self, folder: Path, model: Path, warm: Warm, name: str) -> None:
        self.name = name
        self.port = free_port()
        self.hold_file = folder / f"{name}.hold"
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._where = folder, model, warm
        self.settings = Settings.load(token=TOKEN, control_s=3, engine_ready_s=5)
        self.start()

    def start(self) -> None:
        folder, model, warm = self._where
        env = {
            **DEADLINES, "SYNCSTACK_LISTEN": self.address, "SYNCSTACK_TOKEN": TOKEN,
            "SYNCSTACK_WAIT_FOR_REFIT": "true", "TEST_HOLD": str(self.hold_file),
        }  # fmt: skip
        self.engine = Engine(folder, model, free_port(), "restrictive", 0.0, env=env, name=self.name, warm=warm)

    def restart(self) -> None:
        self.engine.stop()
        self.start()

    @property
    def pid(self) -> int:
        return self.engine.process.pid

    @property
    def ports(self) -> tuple[int, int]:
        """Of the control endpoint and of the worker."""
        return self.port, self.port + 1

    def hold(self, phase: str) -> None:
        """Stop in ``phase`` of the next refit."""
        self.hold_file.with_suffix(".held").unlink(missing_ok=True)
        self.hold_file.write_text(phase)

    def await_held(self) -> None:
        deadline = time.monotonic() + WATCHDOG_S
        while not self.hold_file.with_suffix(".held").exists():
            assert time.monotonic() < deadline, f"{self.name} did not reach {self.hold_file.read_text()}"
            time.sleep(0.005)

    def release(self) -> None:
        self.hold_file.unlink(missing_ok=True)

    def state(self) -> StateReport:
        client = EngineClient.connect(self.address, settings=self.settings)
        try:
            return client.state()
        finally:
            client.close()

    def close(self) -> None:
        self.release()
        self.engine.stop()


class Fleet:
    """Whoever a test made fail is back before the next test."""

    def __init__(self, folder: Path, model: Path, warm: Warm, **env: str) -> None:
        """``env``: more of the trainer's environment."""
        self._env = env
        self._folder, self._model, self._warm = folder, model, warm
        self.members = {name: Member(folder, model, warm, name) for name in ("engine-0", "engine-1")}
        self.usable = True
        """Whether the last test ended as it should; who comes after one that did not needs another fleet."""
        self.version = 0
        self.logprobs: dict[int, list[float]] = {}
        """What each version's weights answer."""
        self.start_trainer()

    def start_trainer(self) -> None:
        self.log = (self._folder / "trainer.log").open("ab")
        argv = [str(self.version), str(self._model), *(member.address for member in self.members.values())]
        env = {
            **environment(self._folder),
            **DEADLINES,
            "SYNCSTACK_TOKEN": TOKEN,
            "SYNCSTACK_MIN_ENGINES": "1",
            **self._env,
        }
        self.trainer = WarmProcess(
            self._warm,
            REPO / "tests/process/fleet_trainer.py",
            argv,
            env=env,
            profile=profile_path("restrictive"),
            stderr=self.log,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self.trainer, self._lines), daemon=True)
        self._reader.start()
        assert self.answer() == {"ready": True}

    @staticmethod
    def _read(trainer: WarmProcess, lines: queue.Queue[str]) -> None:
        for line in trainer.stdout:
            lines.put(line)
        lines.put("")

    def add(self, name: str) -> Member:
        """Another engine, which the trainer does not know yet."""
        self.members[name] = Member(self._folder, self._model, self._warm, name)
        return self.members[name]

    def tell(self, line: str) -> dict[str, Any]:
        """One of the trainer's other lines, and its answer."""
        self.trainer.stdin.write(line + "\n")
        self.trainer.stdin.flush()
        return self.answer()

    def go(self) -> None:
        """Begin the next refit."""
        self.version += 1
        self.trainer.stdin.write("\n")
        self.trainer.stdin.flush()
        self.logprobs[self.version] = self.answer()["logprobs"]

    def answer(self) -> dict[str, Any]:
        """The trainer's next line; {} when it has ended. Fails after the watchdog's time."""
        try:
            line = self._lines.get(timeout=WATCHDOG_S)
        except queue.Empty:
            raise AssertionError(f"the trainer hangs: {self.said()[-3000:]}") from None
        found: dict[str, Any] = json.loads(line) if line else {}
        return found

    def refit(self) -> dict[str, Any]:
        self.go()
        return self.answer()

    def heal(self) -> None:
        """Refit until all engines take part. Fails after the watchdog's time."""
        deadline = time.monotonic() + WATCHDOG_S
        while set(self.refit().get("reports", ())) != set(self.members):
            assert time.monotonic() < deadline, self.said()[-3000:]
            time.sleep(0.1)

    def said(self) -> str:
        return (self._folder / "trainer.log").read_text()

    def served(self, name: str) -> int | None:
        """The version that an engine answers with, None if it refuses. Its answer must be that version's own."""
        return served(self.members[name].engine.url, self.logprobs)

    def stop_trainer(self) -> None:
        if self.trainer.poll() is None:
            os.killpg(self.trainer.pid, signal.SIGKILL)
        self.trainer.wait(WATCHDOG_S)
        self._reader.join()
        self.trainer.close()
        self.log.close()

    def close(self) -> None:
        self.stop_trainer()
        for member in self.members.values():
            member.close()
