"""What the doctor says about GPUs that users have reported; a test is named by its row in the bug log.

There is no GPU here: files, masks and settings go through the probes' own readers, the rest is what they would write.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from syncstack.facts import GpuFacts
from syncstack.facts import gpu as gpu_probe
from syncstack.facts.allocator import allocator
from syncstack.facts.visibility import masks
from tests.unit.doctor_facts import MEMORY, container, device, gpus, one, troubles
from tests.unit.doctor_real import ROOT, UNPRIVILEGED, needs_unprivileged


@pytest.mark.parametrize(
    ("text", "entry", "seen"),
    [
        ("0,,1", "''", "only what stands before it is seen: 0"),
        ("0, 1,-1", "'-1'", "only what stands before it is seen: 0, 1"),
        ("all", "'all'", "no device is seen"),
        ("GPU-1a,MIG-x", "'MIG-x'", "only what stands before it is seen: GPU-1a"),
    ],
)
def test_a28_a_bad_entry_of_a_mask_is_quoted(text: str, entry: str, seen: str) -> None:
    outcome = one(container(gpu=gpus(masks=masks({"CUDA_VISIBLE_DEVICES": text}))), "gpu.masks")
    assert outcome.status == "warn"
    assert outcome.observed == f"CUDA_VISIBLE_DEVICES={text}: entry {entry} is none"
    assert seen in outcome.consequence


@pytest.mark.parametrize("text", ["", "-1", "0,1", "GPU-5c2b7f1e", "MIG-5c2b7f1e-9a3d-4c61-8b7e-0f1e2d3c4b5a"])
def test_a28_every_documented_form_is_understood(text: str) -> None:
    outcome = one(container(gpu=gpus(masks=masks({"CUDA_VISIBLE_DEVICES": text}))), "gpu.masks")
    assert (outcome.status, outcome.observed) == ("pass", f"CUDA_VISIBLE_DEVICES={text}")


EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        ({"PYTORCH_ALLOC_CONF": EXPANDABLE}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "PYTORCH_ALLOC_CONF": EXPANDABLE}, False),
        ({}, False),
    ],
)
def test_a38_both_names_of_the_setting_are_read(environ: dict[str, str], warned: bool) -> None:
    memory = replace(MEMORY, memlock_soft_bytes=None)
    gpu = gpus(device(), allocator=allocator(environ, torch=object()))
    outcome = one(container(memory=memory, gpu=gpu), "gpu.allocator")
    assert outcome.status == ("warn" if warned else "pass")
    assert all(f"{name}='{value}'" in outcome.observed for name, value in environ.items())
    if warned:
        assert "sleep mode" in outcome.consequence
        # The name that torch reads first: it then does not matter what the other one says.
        assert outcome.remedy.compose == 'environment: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:False"}'
    assert troubles(container("permissive", memory=memory, gpu=gpu)) == {}


def test_a39_the_missing_channel_is_named_and_not_memory() -> None:
    memory = replace(MEMORY, memlock_soft_bytes=None)
    outcome = one(container(memory=memory, gpu=gpus(device(fabric=True))), "gpu.handles")
    assert outcome.status == "pass"
    assert '"not permitted" means the channel and not memory, and descriptors are used' in outcome.observed
    assert outcome.remedy.compose == 'devices: ["/dev/nvidia-caps-imex-channels/channel0"]'


def gpu_host(root: Path, *nodes: str, mode: int = 0o666) -> Path:
    """Make a host with NVIDIA's driver and device files: ordinary files, as this kernel has no such driver."""
    version = root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05")
    (root / "dev").mkdir()
    for name in nodes:
        (root / "dev" / name).touch()
        (root / "dev" / name).chmod(mode)
    return root


CHILD = "import json, sys; print(json.dumps({'problem': 'no driver library: libcuda.so.1: cannot open'}))"


def test_f10_no_node_no_permission_and_no_library_are_three_verdicts(tmp_path: Path) -> None:
    asked = {"NVIDIA_VISIBLE_DEVICES": "all"}
    none = gpu_probe.gpus(asked, gpu_host(tmp_path / "a"))
    library = gpu_probe.gpus(asked, gpu_host(tmp_path / "c", "nvidia0", "nvidiactl"), (sys.executable, "-c", CHILD))
    closed = replace(library, problem="no permission: opening /dev/nvidiactl: Operation not permitted")
    memory = replace(MEMORY, memlock_soft_bytes=None)
    found = [one(container(memory=memory, gpu=gpu), "gpu.devices") for gpu in (none, closed, library)]
    assert [outcome.status for outcome in found] == ["warn"] * 3
    assert [outcome.observed.partition(":")[0] for outcome in found] == [
        "no GPU node", "no permission", "no driver library",
    ]  # fmt: skip
    assert len({outcome.remedy.compose for outcome in found}) == 3
    assert "reservations" in found[0].remedy.compose
    assert "group_add" in found[1].remedy.compose
    assert "NVIDIA_DRIVER_CAPABILITIES" in found[2].remedy.compose


@needs_unprivileged
def test_f10_a_node_that_may_not_be_opened(tmp_path: Path) -> None:
    """The modes are real, the files are not devices."""
    root = gpu_host(tmp_path / "host", "nvidia0", "nvidiactl", mode=0o600)
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    code = (
        "import msgspec; from pathlib import Path; from syncstack.facts import gpu\n"
        f"print(msgspec.json.encode(gpu.gpus({{}}, Path({str(root)!r}))).decode())"
    )
    command = [*UNPRIVILEGED, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    outcome = one(container(gpu=msgspec.json.decode(done.stdout, type=GpuFacts)), "gpu.devices")
    assert outcome.status == "warn"
    assert outcome.observed.startswith("no permission: ")
    assert "mode 0600, owner 0:0" in outcome.observed


def test_f10_a_container_that_wants_no_gpu_is_left_alone(tmp_path: Path) -> None:
    gpu = gpu_probe.gpus({}, gpu_host(tmp_path))
    assert troubles(container(gpu=gpu)) == {}
    assert "the container was given no device" in one(container(gpu=gpu), "gpu.devices").observed


@pytest.mark.parametrize("mode", ["exclusive-process", "prohibited"])
def test_f11_a_gpu_for_one_process_cannot_be_shared(mode: str) -> None:
    memory = replace(MEMORY, memlock_soft_bytes=None)
    outcome = one(container(memory=memory, gpu=gpus(device(compute_mode=mode))), "gpu.compute-mode")
    assert outcome.status == "warn"
    assert outcome.observed == f"GPU 0 (NVIDIA H200): {mode}"
    assert "nvidia-smi -c DEFAULT" in outcome.remedy.other
    assert "MPS" in outcome.remedy.other
