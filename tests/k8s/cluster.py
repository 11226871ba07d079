"""A cluster, and what the tests ask of it through kubectl, as a user does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.compose.stack import ROOT, check, run

NAMESPACE = "syncstack"
LAYOUTS = ("colocated", "disagg")
PROFILES = ("restrictive", "permissive", "RuntimeDefault")
START_S = 300.0

T = TypeVar("T")


def kubectl(*arguments: str, namespace: str = NAMESPACE, timeout_s: float = 60) -> str:
    return check("kubectl", "--namespace", namespace, *arguments, timeout_s=timeout_s)


def get(*arguments: str, namespace: str = NAMESPACE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kubectl("get", *arguments, "--output", "json", namespace=namespace))
    return found


def until(what: str, found: Callable[[], T | None], timeout_s: float = START_S) -> T:
    """Ask again and again until there is something; a test that waits in vain says for what."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = found()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{kubectl('describe', 'pods')[-6000:]}"
        time.sleep(1)


@contextmanager
def kustomization(name: str, text: str) -> Iterator[str]:
    """A folder with a kustomization over the checkout's k8s/, as a user's own would be; its path from the checkout."""
    folder = ROOT / ".run" / name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / "kustomization.yaml").write_text(text)
        yield str(folder.relative_to(ROOT))
    finally:
        shutil.rmtree(folder)


def running(name: str) -> set[str] | None:
    """POD/CONTAINER of each container of an application; None until all of them run."""
    found = set()
    for pod in get("pods", f"--selector=app.kubernetes.io/name={name}")["items"]:
        for status in pod["status"].get("containerStatuses", []):
            if "running" not in status["state"]:
                return None
            found.add(f"{pod['metadata']['name']}/{status['name']}")
    return found or None


def inside(where: str, *command: str) -> str:
    """Run a command in POD/CONTAINER. Its standard output."""
    pod, _, container = where.partition("/")
    argv = ["kubectl", "--namespace", NAMESPACE, "exec", pod, "--container", container, "--", *command]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def seccomp_mode(where: str) -> int:
    """What the kernel says of the container's first process: 2 is a filter."""
    match = re.search(r"^Seccomp:\s+(\d)$", inside(where, "cat", "/proc/1/status"), re.MULTILINE)
    assert match is not None
    return int(match[1])


class Training:
    """`make up-k8s` in the background."""

    def __init__(self, log: Path, **variables: str) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                ["make", "up-k8s"],
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def going(self) -> None:
        """Fail early, with what it said, where it has ended with an error."""
        assert self.process.poll() in (None, 0), self.output[-6000:]

    def done(self, timeout_s: float = START_S) -> str:
        """Wait for its end, which must be a good one. What it printed."""
        assert self.process.wait(timeout_s) == 0, self.output[-6000:]
        return self.output

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 15)
            self.process.wait(30)
        run("make", "down-k8s", timeout_s=180)
