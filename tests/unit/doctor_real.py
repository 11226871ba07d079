"""Ways to make a cause real: the command under a filter, in a namespace, or without its rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from syncstack.facts import TargetFact, process
from syncstack.facts.target import Claim, probe_target
from tests.unit.doctor_facts import SHARED

CLI = (sys.executable, "-m", "syncstack.cli")
ROOT = Path(__file__).parents[2]
NO_FOLDER = replace(SHARED, writable=False)
POWERLESS = ("setpriv", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--")
UNPRIVILEGED = ("setpriv", "--reuid=10001", "--regid=10001", "--clear-groups", "--inh-caps=-all", "--")


def doctor(*prefix: str, only: tuple[str, ...] = (), folder: Path | None = None) -> dict[str, Any]:
    """Run the command under ``prefix`` and return its JSON; checks by id in ``by_id``."""
    command = [*prefix, *CLI, "doctor", "-o", "json"]
    for name in only:
        command += ["--only", name]
    if folder is not None:
        command += ["--socket-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "by_id": {check["id"]: check for check in found["checks"]}}


def can(*command: str) -> bool:
    """Whether this interpreter can be run in that way here."""
    command = (*command, sys.executable, "-c", "import msgspec")
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_mounts = pytest.mark.skipif(not can("unshare", "--mount"), reason="needs the right to make a mount namespace")
needs_users = pytest.mark.skipif(
    not can("unshare", "--map-root-user"), reason="needs the right to make a user namespace"
)
needs_powerless = pytest.mark.skipif(not can(*POWERLESS), reason="needs setpriv and the right to drop capabilities")
needs_no_filter = pytest.mark.skipif(
    "Seccomp:\t0\n" not in Path("/proc/self/status").read_text(),
    reason="a filter is in force here already, and would answer in place of the cause",
)
needs_unprivileged = pytest.mark.skipif(not can(*UNPRIVILEGED), reason="needs setpriv and the right to change the user")


def filtered(folder: Path, *names: str, errno: int) -> tuple[str, ...]:
    """Return the command line that refuses ``names`` with ``errno``, by a real filter."""
    rule = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": errno}
    profile = {"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"], "syscalls": [rule]}
    path = folder / "profile.json"
    path.write_text(json.dumps(profile))
    return (*CLI, "seccomp", "run", str(path), "--")


def peer(pid: int, fd: int) -> TargetFact:
    """Return what pidfd_getfd really answers for a process of ours."""
    found = process.life(pid)
    assert found is not None
    claim = Claim(
        boot_id=process.boot_id(), pid_namespace=process.namespaces()["pid"], start_ticks=found[1], dumpable=None
    )
    return probe_target(pid, fd, claim)


def sleeper(code: str = "", *prefix: str) -> subprocess.Popen[bytes]:
    """Start a process that runs ``code``, says so, and stays until its input ends."""
    program = f"{code}\nprint(flush=True)\ninput()"
    target = subprocess.Popen([*prefix, sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert target.stdout is not None
    target.stdout.readline()
    return target


def end(target: subprocess.Popen[bytes]) -> None:
    target.kill()
    target.communicate(timeout=30)
