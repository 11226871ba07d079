"""An engine is killed while others serve: training goes on, and it comes back to the current version only."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.compose.stack import ROOT, check, containers, inspect, read_report, run

STEPS = 30
"""Enough for an engine to come back meanwhile: its node, its actor, a vLLM that loads on two cores that train."""
VICTIM = "engine-1"
REQUEST = {"model": "/models/smollm2-135m-instruct", "prompt": [1, 2, 3], "max_tokens": 1}


class Training:
    """`make up-disagg DETACH=1` while it trains; each line of its output as it comes."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            ["make", "up-disagg"],
            cwd=ROOT,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def until(self, pattern: str) -> str:
        """Read on to the line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern} never came:\n" + "".join(self.lines[-60:]))

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def training(project: str, tmp_path: Path) -> Iterator[Training]:
    variables = {"PROJECT": project, "SECCOMP": "restrictive", "OUT": str(tmp_path), "ENGINE_TIMEOUT": "600"}
    made = Training({**variables, "STEPS": str(STEPS), "DETACH": "1"})
    try:
        yield made
    finally:
        made.close()
        for name in containers(project):  # pytest shows it where the test failed; afterwards nobody can ask them
            print(f"--- {name}\n{run('docker', 'logs', '--tail', '80', name).stdout}")
        check("make", "down", timeout_s=120, PROJECT=project)


def container(project: str, service: str) -> str:
    found = check("docker", "ps", "--all", "--quiet", "--filter", f"name={project}-{service}").split()
    assert len(found) == 1
    return found[0]


class Asking:
    """Asks an engine over and over, past its trainer; the versions whose weights answered."""

    def __init__(self, container: str) -> None:
        self.versions: set[int] = set()
        self.refused = 0
        self._container = container
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        while not self._over.wait(0.3):
            try:
                (where,) = inspect(self._container)["NetworkSettings"]["Ports"]["8000/tcp"]
                answer = httpx.post(f"http://127.0.0.1:{where['HostPort']}/v1/completions", json=REQUEST, timeout=30)
            except (httpx.HTTPError, KeyError, TypeError):
                continue  # it is not up yet
            if answer.status_code == 200:
                self.versions.add(int(answer.headers["x-syncstack-version"]))
            else:
                self.refused += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def test_training_goes_on_without_an_engine_and_takes_it_back(
    training: Training, project: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training.until(r"^ +2 +\d")
    victim = container(project, VICTIM)
    check("docker", "kill", victim)
    training.until(f"{VICTIM} (was left behind in|is dead) ?")
    training.until(r"^ +\d+ +\d")  # a step without it
    check("docker", "start", victim)
    asking = Asking(victim)
    try:
        back = re.search(r"version (\d+) after ([\d.]+) s", training.until(f"{VICTIM} is back with version "))
        assert back is not None
        version = int(back[1])
        training.until("end it with: make down")
    finally:
        asking.close()
    assert training.process.wait(60) == 0
    with capfd.disabled():
        print(f"\n{VICTIM} was killed, and served version {version} after {back[2]} s")

    report = read_report(tmp_path)
    assert report["outcome"]["status"] == "ok"
    taken = {
        name: [refit["version"] for refit in report["refits"] if refit["engine"] == name]
        for name in ("engine-0", VICTIM)
    }
    assert taken["engine-0"] == [*range(1, STEPS + 2)]
    missed = sorted(set(taken["engine-0"]) - set(taken[VICTIM]))
    assert missed == [*range(missed[0], missed[-1] + 1)]
    # It came back with a refit (which it did not miss), or between two; then it got what the others had just then, and
    # also the next one by itself where a refit had begun meanwhile.
    assert version - 1 <= missed[-1] <= version + 1
    for refit in report["refits"]:
        assert refit["digests_equal"] is True
        assert refit["max_abs_dlogprob"] <= refit["parity_tolerance"]
    # Before its first refit it had the weights of its model folder: nobody got an answer of those.
    assert asking.refused > 0
    assert asking.versions
    assert asking.versions <= set(range(version, STEPS + 2))
