"""`syncstack node` and `syncstack launch`: a real Ray cluster of three nodes, each under the restrictive profile, with
a trainer and two engines on it; nodes, actors and engines that are really killed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from syncstack.facts.network import interfaces
from tests.ports import free_port
from tests.process.conftest import REPO, environment, served, under
from tests.process.fleet import DEADLINES, TOKEN

pytestmark = pytest.mark.timeout(300)
WATCHDOG_S = 150.0
"""Three nodes and two engines start at once on two cores."""
BOTH = ["engine-0", "engine-1"]
PROBES = {
    "SYNCSTACK_PROBE_INTERVAL_S": "0.3", "SYNCSTACK_PROBE_TIMEOUT_S": "2", "SYNCSTACK_RESTART_BACKOFF_S": "0.2",
    "SYNCSTACK_RESTART_BACKOFF_MAX_S": "2", "SYNCSTACK_RESTARTS": "50", "SYNCSTACK_MIN_ENGINES": "1",
}  # fmt: skip
SYNCSTACK = [sys.executable, "-m", "syncstack.cli"]


def own_address() -> str:
    """Ray takes no loopback address."""
    found = [a for each in interfaces() if each.up and not each.loopback for a in each.ipv4]
    if not found:
        pytest.skip("Ray needs an IPv4 address beside the loopback's, and this machine has none")
    return found[0]


def children(pid: int) -> list[int]:
    """A process and all that descend from it, as a container's end would end them."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


class Node:
    """One `syncstack node`."""

    def __init__(self, folder: Path, name: str, options: list[str], env: dict[str, str]) -> None:
        self.name, self._options = name, options
        self.log = folder / f"{name}.log"
        self._env = environment(folder) | DEADLINES | {"SYNCSTACK_TOKEN": TOKEN, "SYNCSTACK_ENGINE_NAME": name} | env
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                under("restrictive", [*SYNCSTACK, "node", *self._options]),
                env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=REPO,
            )  # fmt: skip

    def pids(self, text: str) -> list[int]:
        """Of this node's processes whose command line has a text in it."""
        return [pid for pid in children(self.process.pid) if text in command_of(pid)]

    def kill(self) -> None:
        for pid in children(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


class Cluster:
    """A head, where a trainer may be placed as well, and two nodes for engines."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.address = own_address()
        self.head = f"{self.address}:{free_port()}"
        join = ["--join", self.head]
        self.nodes = {
            "head": Node(folder, "head", ["--head", self.head, "--role", "driver", "--role", "trainer"], PROBES)
        }
        for name in BOTH:
            port = free_port()
            env = {
                "SYNCSTACK_LISTEN": f"tcp://{self.address}:{free_port()}",
                "SYNCSTACK_ENGINE_URL": f"http://{self.address}:{port}",
                "SYNCSTACK_WAIT_FOR_REFIT": "true",
                "TEST_PORT": str(port),
            }
            self.nodes[name] = Node(folder, name, [*join, "--role", "engine"], env)

    def launch(self, trainer: list[str], *options: str, token: str = TOKEN) -> subprocess.Popen[str]:
        # Each engine's port is its node's; the command is one for all of them.
        command = [*SYNCSTACK, "engine", "reference", "--model", str(self.model), "--host", self.address]
        engine = f"sh -c 'exec {' '.join(command)} --port $TEST_PORT'"
        argv = [*SYNCSTACK, "launch", "--join", self.head, "--engine", engine, *options, "--", *trainer]
        with (self.folder / "launch.log").open("ab") as log:
            return subprocess.Popen(
                argv, env=environment(self.folder) | {"SYNCSTACK_TOKEN": token}, cwd=REPO, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()


class Launched:
    """The trainer that was placed, and what it says."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fifo = cluster.folder / "lines"
        os.mkfifo(self.fifo)
        trainer = [sys.executable, "-m", "tests.process.launched_trainer", str(self.fifo), str(cluster.model)]
        self.process = cluster.launch(trainer, "--engines", "2", "--layout", "disagg")
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.urls: dict[str, str] = {}
        self.version = 0
        self.logprobs: dict[int, list[float]] = {}

    def begin(self) -> None:
        self.urls = self.answer()["urls"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=WATCHDOG_S)
        except queue.Empty:
            line = ""
        assert line, "\n".join(log.read_text()[-3000:] for log in sorted(self.cluster.folder.glob("*.log")))
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, line: str) -> dict[str, Any]:
        self.fifo.write_text(line + "\n")
        return self.answer()

    def refit(self) -> list[str]:
        found = self.tell("refit")
        self.version = found["version"]
        self.logprobs[self.version] = found["logprobs"]
        engines: list[str] = found["engines"]
        return engines

    def until(self, name: str, done: Callable[[str, int | None], bool]) -> list[str]:
        """Wait for an engine's state; returns those that were seen on the way."""
        deadline, seen = time.monotonic() + WATCHDOG_S, list[str]()
        while True:
            said = self.tell("states")
            state, version, _ = said["states"][name]
            seen += [state] * (seen[-1:] != [state])
            if done(state, version):
                return seen
            assert time.monotonic() < deadline, (seen, said)
            time.sleep(0.1)

    def healthy(self, name: str) -> list[str]:
        return self.until(name, lambda state, version: (state, version) == ("healthy", self.version))

    def served(self, name: str) -> int | None:
        return served(self.urls[name], self.logprobs)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"), model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def stranger(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """Somebody with another token, from the beginning: Ray takes its time to give up."""
    process = cluster.launch(["true"], token="f" * 32)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def launched(cluster: Cluster, stranger: object) -> Iterator[Launched]:
    made = Launched(cluster)
    try:
        made.begin()
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def test_each_engine_has_the_first_version(launched: Launched) -> None:
    assert launched.refit() == BOTH
    assert [launched.served(name) for name in BOTH] == [1, 1]


def test_an_engine_that_hangs_is_ended_and_brought_back(launched: Launched) -> None:
    (pid,) = [pid for pid in launched.cluster.nodes["engine-1"].pids("engine reference") if os.getpgid(pid) == pid]
    os.killpg(pid, signal.SIGSTOP)
    assert "restarting" in launched.until("engine-1", lambda state, _: state == "restarting")
    launched.healthy("engine-1")
    assert not command_of(pid)
    assert launched.served("engine-1") == launched.version
    assert launched.refit() == BOTH


def test_an_engine_ends_with_its_actor_and_both_come_back(launched: Launched) -> None:
    node = launched.cluster.nodes["engine-1"]
    engines = node.pids("engine reference")
    (actor,) = node.pids("ray::Host")
    os.kill(actor, signal.SIGKILL)
    launched.until("engine-1", lambda state, _: state != "healthy")
    launched.healthy("engine-1")
    assert not any(command_of(pid) for pid in engines)
    assert launched.refit() == BOTH


def test_training_goes_on_without_a_node_that_is_lost_and_takes_it_back(launched: Launched) -> None:
    node = launched.cluster.nodes["engine-1"]
    node.kill()
    assert launched.refit() == ["engine-0"]
    assert launched.tell("states")["current"] == ["engine-0"]
    begin = time.monotonic()
    node.start()
    seen = launched.healthy("engine-1")
    print(f"back after {time.monotonic() - begin:.1f} s by {seen}")
    assert launched.served("engine-1") == launched.served("engine-0") == launched.version
    assert launched.refit() == BOTH


def test_engines_run_with_the_environment_of_their_node(launched: Launched) -> None:
    node = launched.cluster.nodes["engine-0"]
    (pid, *_) = node.pids("engine reference")
    found = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"RAY_" not in found
    assert b"SYNCSTACK_ENGINE_NAME=engine-0" in found
    assert "uvicorn" in node.log.read_text().lower() or "engine" in node.log.read_text()


def test_a_second_launch_finds_no_place_and_disturbs_nobody(launched: Launched) -> None:
    process = launched.cluster.launch(["true"], "--engines", "1", "--layout", "disagg", "--wait", "0")
    process.communicate(timeout=WATCHDOG_S)
    assert process.returncode == 2
    said = (launched.cluster.folder / "launch.log").read_text()
    assert "no place for a trainer and 1 engines, disagg" in said
    assert "engine-0: taken; engine-1: taken; head: driver" in said
    assert launched.refit() == BOTH


def test_a_stranger_is_refused(launched: Launched, stranger: subprocess.Popen[str]) -> None:
    assert stranger.wait(WATCHDOG_S) == 1
    assert "cannot be used from here" in (launched.cluster.folder / "launch.log").read_text()


def test_a_launch_that_is_told_to_end_ends_trainer_and_engines(launched: Launched) -> None:
    pids = [pid for name in BOTH for pid in launched.cluster.nodes[name].pids("engine reference")]
    (trainer, *_) = launched.cluster.nodes["head"].pids("launched_trainer")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(WATCHDOG_S) == 130
    deadline = time.monotonic() + WATCHDOG_S
    while any(command_of(pid) for pid in [*pids, trainer]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_exit_status_is_the_trainers_and_its_output_comes_whole(launched: Launched) -> None:
    code = "print('x' * 200000); print('the end'); raise SystemExit(3)"
    trainer = [sys.executable, "-c", code]
    process = launched.cluster.launch(trainer, "--engines", "1", "--layout", "colocated", "--wait", "30")
    said, _ = process.communicate(timeout=WATCHDOG_S)
    assert process.returncode == 3
    assert said == "x" * 200000 + "\nthe end\n"
