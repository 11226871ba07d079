"""One stack of real containers, started the way a user starts it, and what the tests ask of it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAYOUTS = ("colocated", "disagg")
PROFILES = ("restrictive", "permissive", "docker-default", "unconfined")
STARTED = tuple(os.environ.get("PROFILES", "").split()) or PROFILES
"""Profiles whose stack is started: all, unless the variable PROFILES names some (CI has one job for each)."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A stack that has trained and still serves (DETACH=1)."""

    layout: str
    profile: str
    out: Path
    """Where the host got the results."""
    output: str
    """What `make up-colocated` printed."""
    engines: dict[str, str]
    """Ids of the engines' containers, which run, by the engine's name."""
    trainer: str
    """Id of the container that trained, which has ended."""
    sibling: str
    """Id of another container of the trainer's service, which sleeps: the same settings, but one can look into it."""

    @property
    def engine(self) -> str:
        """Id of the first engine's container."""
        return self.engines["engine-0"]

    def url(self, name: str) -> str:
        """Where the API of an engine answers on this host."""
        (where,) = inspect(self.engines[name])["NetworkSettings"]["Ports"]["8000/tcp"]
        return f"http://{where['HostIp']}:{where['HostPort']}"

    @property
    def report(self) -> dict[str, Any]:
        return read_report(self.out)


def read_report(out: Path) -> dict[str, Any]:
    """The report of the only run in a folder."""
    (path,) = out.glob("*/report.json")
    report: dict[str, Any] = json.loads(path.read_bytes())
    return report


def run(*command: str, timeout_s: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout with ``variables`` added to the environment; the result says what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def check(*command: str, timeout_s: float = 60, **variables: str) -> str:
    """As :func:`run`, but a command that fails ends the test with what it printed."""
    result = run(*command, timeout_s=timeout_s, **variables)
    assert result.returncode == 0, f"{' '.join(command)}: exit {result.returncode}\n{result.stdout[-6000:]}"
    return result.stdout


def inspect(name: str, kind: str = "container") -> dict[str, Any]:
    """What Docker says about a container or an image."""
    details: dict[str, Any] = json.loads(check("docker", kind, "inspect", name))[0]
    return details


def facts(container: str) -> dict[str, Any]:
    """``python -m syncstack.facts``, run in a container."""
    collected: dict[str, Any] = json.loads(check("docker", "exec", container, "python", "-m", "syncstack.facts"))
    return collected


def containers(project: str) -> list[str]:
    """Names of a project's containers, ended ones as well."""
    return check(
        "docker", "ps", "--all", "--filter", f"label=com.docker.compose.project={project}", "--format", "{{.Names}}"
    ).split()
