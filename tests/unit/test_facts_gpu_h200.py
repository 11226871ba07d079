"""What a real machine with one H200 said (tests/fixtures/h200.json), and, where there is a GPU, what this one says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncstack.facts import GpuDevice, GpuFacts, VisibilityMask
from syncstack.facts.gpu import gpus
from syncstack.facts.visibility import masks, parse, repeated
from tests.unit.doctor_facts import MEMORY, container, one, replace

RECORDED: Any = json.loads((Path(__file__).parents[1] / "fixtures/h200.json").read_text())
NO_DEVICE, INVALID_DEVICE = 100, 101


def seen(mask: VisibilityMask, uuid: str) -> int:
    """Return how many devices a machine with one GPU shows under a mask; the driver stops at one that it has not."""
    name = uuid.replace("-", "").lower()
    known = [entry == "0" or name.startswith(entry.replace("-", "").lower()) for entry in mask.entries]
    return int(bool(known) and known[0])


@pytest.mark.parametrize(("text", "code", "count"), RECORDED["masks"])
def test_a28_a_mask_is_understood_as_the_driver_did(text: str, code: int, count: int) -> None:
    mask = parse("CUDA_VISIBLE_DEVICES", text)
    assert bool(repeated(mask)) == (code == INVALID_DEVICE or text in UNTOLD)
    if code != INVALID_DEVICE:
        assert (seen(mask, RECORDED["uuid"]), code) == (count, 0 if count else NO_DEVICE)


# The driver stops at the index that it does not have, or at the UUID, before it comes to the repetition.
UNTOLD = ("0,1,0", f"{RECORDED['uuid']},GPU-deadbeef,{RECORDED['uuid']}")


@pytest.mark.parametrize(
    ("text", "entries", "stopped_at", "misread"),
    [
        ("0;1", ("0",), "", "'0;1' for 0"),
        ("0 1", ("0",), "", "'0 1' for 0"),
        ("0:0", ("0",), "", "'0:0' for 0"),
        ("4294967297", ("1",), "", "'4294967297' for 1"),
        ("0,GPU-5c2b7f1e", ("0",), "'GPU-5c2b7f1e'", ""),
        ("GPU-5c2b7f1e,0", ("GPU-5c2b7f1e",), "'0'", ""),
        ("GPU-5c2b7f1e, GPU-6d", ("GPU-5c2b7f1e",), "' GPU-6d'", ""),
        (f"{RECORDED['uuid']}zzz", (RECORDED["uuid"],), "", f"'{RECORDED['uuid']}zzz' for {RECORDED['uuid']}"),
    ],
)
def test_a28_what_the_driver_takes_for_something_else(
    text: str, entries: tuple[str, ...], stopped_at: str, misread: str
) -> None:
    mask = parse("CUDA_VISIBLE_DEVICES", text)
    assert (mask.entries, mask.stopped_at, mask.misread) == (entries, stopped_at, misread)
    memory = replace(MEMORY, memlock_soft_bytes=None)
    outcome = one(container(memory=memory, gpu=GpuFacts(count=2, evidence="", masks=(mask,))), "gpu.masks")
    assert outcome.status == "warn"
    assert (misread or stopped_at) in outcome.observed


def machine(root: Path, *nodes: str) -> Path:
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(RECORDED["version"])
    (root / "dev").mkdir()
    for name in nodes:
        (root / "dev" / name).touch()
    return root


def answer(problem: str = "", **more: Any) -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({json.dumps({'problem': problem, **more})!r})")


def verdict(gpu: GpuFacts) -> tuple[str, str]:
    outcome = one(container(memory=replace(MEMORY, memlock_soft_bytes=None), gpu=gpu), "gpu.devices")
    return outcome.status, outcome.observed


NODES = ("nvidiactl", "nvidia0", "nvidia-uvm")


def test_the_recorded_machine(tmp_path: Path) -> None:
    found = gpus({}, machine(tmp_path, *NODES), answer(devices=RECORDED["devices"]))
    assert (found.driver, found.count, found.problem) == ("580.159.04", 1, "")
    assert found.devices == (msgspec.convert(RECORDED["devices"][0], GpuDevice),)
    assert verdict(found) == ("pass", "1: /dev: nvidia0; NVIDIA H200 (140 GiB); driver 580.159.04")


@pytest.mark.parametrize(
    ("text", "code", "status"),
    [("", 100, "pass"), ("-1", 100, "pass"), ("1", 100, "warn"), ("all", 100, "warn"), ("0,0", 101, "warn")],
)
def test_a40_a_mask_that_leaves_no_device_is_named(tmp_path: Path, text: str, code: int, status: str) -> None:
    """cuInit says no more than "no device", and nvidia-smi, which reads no mask, shows them all."""
    error = {100: "cuInit: CUDA_ERROR_NO_DEVICE (100)", 101: "cuInit: CUDA_ERROR_INVALID_DEVICE (101)"}[code]
    found = gpus({"CUDA_VISIBLE_DEVICES": text}, machine(tmp_path, *NODES), answer(error))
    assert found.problem == f"hidden: CUDA_VISIBLE_DEVICES={text!r} leaves no device: {error}"
    assert verdict(found) == (status, found.problem)
    assert gpus({}, tmp_path, answer(error)).problem == error


def test_f10_the_file_without_which_cuda_does_not_start(tmp_path: Path) -> None:
    error = "cuInit: CUDA_ERROR_UNKNOWN (999)"
    found = gpus({}, machine(tmp_path, "nvidiactl", "nvidia0"), answer(error))
    assert found.problem == f"no GPU node: {tmp_path}/dev/nvidia-uvm is missing: {error}"
    (tmp_path / "dev/nvidia-uvm").touch()
    assert gpus({}, tmp_path, answer(error)).problem == error


def test_a_dev_that_may_not_be_listed(tmp_path: Path) -> None:
    (tmp_path / "dev").touch()
    assert gpus({}, tmp_path).count == 0


needs_gpu = pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@needs_gpu
def test_the_facts_of_this_gpu_are_those_of_nvidia_smi() -> None:
    query = "--query-gpu=uuid,name,driver_version,compute_mode,memory.total,memory.reserved"
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    shown = [line.split(", ") for line in subprocess.check_output(argv, text=True, timeout=60).splitlines()]
    found = gpus({name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"})
    assert found.problem == ""
    assert {device.uuid: (device.name, found.driver, device.compute_mode) for device in found.devices} == {
        uuid: (name, driver, mode.lower().replace("_", "-")) for uuid, name, driver, mode, *_ in shown
    }
    total = {uuid: int(whole) - int(reserved) for uuid, _, _, _, whole, reserved in shown}
    assert all(abs((device.memory_bytes >> 20) - total[device.uuid]) <= 2 for device in found.devices)
    # The child asked; nothing of the driver is in this process.
    assert not re.search(r"libcuda\.so|/dev/nvidia", Path("/proc/self/maps").read_text())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("text", ["", "-1", "0", "0;1", "0,0", "GPU-deadbeef", "0,,1", " 0", "99"])
def test_a_mask_as_the_driver_here_reads_it(text: str) -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": text}
    found, mask = gpus(environ), masks(environ)[0]
    wanted = [] if repeated(mask) else [entry for entry in mask.entries if entry == "0"]
    assert [device.index for device in found.devices] == list(range(len(wanted)))
    assert found.problem.startswith("hidden: ") == (not wanted)
