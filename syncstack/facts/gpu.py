"""NVIDIA devices: counted by their files, named by the driver in a child process.

Asking the driver leaves a context behind and may crash or hang, so it is a child that asks, and only where there are
device files.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from syncstack.facts.allocator import allocator
from syncstack.facts.model import GpuDevice, GpuFacts, VisibilityMask
from syncstack.facts.process import read_text
from syncstack.facts.visibility import masks

CHILD_S: Final = 5.0
_DEVICE: Final = re.compile(r"nvidia\d+")
_VERSION: Final = re.compile(r"\b\d+\.\d+(?:\.\d+)?\b")
_MASKED: Final = ("cuInit: CUDA_ERROR_NO_DEVICE", "cuInit: CUDA_ERROR_INVALID_DEVICE")
_ASK: Final = (sys.executable, "-P", "-m", "syncstack.facts.gpu_child")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the child prints, as JSON."""

    devices: tuple[GpuDevice, ...] = ()
    problem: str = ""


def gpus(environ: Mapping[str, str], root: Path = Path("/"), ask: Sequence[str] = _ASK) -> GpuFacts:
    """Return the devices that this process can use, and what was looked at; ``ask`` is the command of the child."""
    folder = root / "dev"
    names = _names(folder)
    driver = _VERSION.search(read_text(root / "proc/driver/nvidia/version"))
    answer, evidence = Answer(), f"/dev: {', '.join(names)}"
    if names:
        refusal = _refusal([folder / name for name in ("nvidiactl", *names)])
        answer = Answer(problem=refusal) if refusal else _child(ask, environ)
    elif driver is None:
        evidence = "no /dev/nvidia* and no NVIDIA driver"
    else:
        evidence = "the driver is loaded, but no /dev/nvidia0 or other GPU here: the container was given no device"
        answer = Answer(problem=f"no GPU node: {evidence}")
    found = masks(environ)
    return GpuFacts(
        count=len(names),
        evidence=evidence,
        driver=driver[0] if driver else "",
        devices=answer.devices,
        masks=found,
        allocator=allocator(environ),
        problem=_explained(answer.problem, found[0], folder),
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if _DEVICE.fullmatch(path.name))
    except OSError:
        return []


def _explained(problem: str, mask: VisibilityMask, folder: Path) -> str:
    """Say what the driver's error leaves out: a mask that leaves no device or names one twice, or a missing file."""
    if mask.kind != "unset" and problem.startswith(_MASKED):
        return f"hidden: {mask.name}={mask.text!r} leaves no device: {problem}"
    unified = folder / "nvidia-uvm"  # root's libcuda makes it, another user's cannot
    if problem.startswith("cuInit: CUDA_ERROR_UNKNOWN") and not unified.exists():
        return f"no GPU node: {unified} is missing: {problem}"
    return problem


def _refusal(nodes: Sequence[Path]) -> str:
    """Return why the device files cannot be used, "" if they can, as far as their modes tell."""
    missing = [path for path in nodes if not path.exists()]
    if missing:
        return f"no GPU node: {', '.join(map(str, missing))} is missing"
    closed = [path for path in nodes if not os.access(path, os.R_OK | os.W_OK)]
    if nodes[0] in closed or len(closed) == len(nodes) - 1:
        found = closed[0].stat()
        owner = f"mode {found.st_mode & 0o7777:04o}, owner {found.st_uid}:{found.st_gid}"
        return f"no permission: {closed[0]} ({owner}), and this is {os.geteuid()}:{os.getegid()}"
    return ""


def _child(ask: Sequence[str], environ: Mapping[str, str]) -> Answer:
    """Let a child ask the driver. It gets ``environ``, because the driver reads its masks there."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (package, environ.get("PYTHONPATH", "")) if part)
    try:
        child = subprocess.Popen(
            ask,
            env={**environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return Answer(problem=f"the child that asks the driver could not be started: {error.strerror}")
    try:
        output, errors = child.communicate(timeout=CHILD_S)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it in the kernel
            child.communicate(timeout=1.0)
        return Answer(problem=f"the driver gave no answer within {CHILD_S:g} s")
    return _understood(child.returncode, output, errors)


def _understood(status: int, output: bytes, errors: bytes) -> Answer:
    if status == 0:
        try:
            return msgspec.json.decode(output, type=Answer)
        except msgspec.DecodeError as error:
            return Answer(problem=f"the child that asks the driver printed no answer: {error}")
    ended = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    said = errors.decode(errors="replace").strip().splitlines()[-1:]
    return Answer(problem=": ".join([f"the child that asks the driver {ended}", *said]))
