"""GPUs. There is none here: the driver is a fake at the ctypes boundary, and MIG and the masks are fixtures.

The child process, its deadline and its crashes are real.
"""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import types
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncstack.facts import gpu, gpu_child
from syncstack.facts.allocator import allocator
from syncstack.facts.gpu import Answer, gpus
from syncstack.facts.model import GpuDevice
from syncstack.facts.visibility import masks, parse

UUIDS = [bytes([number]) * 16 for number in range(1, 9)]
TEXTS = [f"GPU-{uuid.UUID(bytes=raw)}" for raw in UUIDS]


class FakeCuda:
    """libcuda as ctypes shows it: results go where the arguments point, and what is returned is an error code.

    ``visible`` are the devices in the order in which the driver counts them; handles are not their indices.
    """

    def __init__(
        self, visible: list[int], *, init: int = 0, mode: int = 0, mig: bytes = b"", old: bool = False
    ) -> None:
        self.visible, self.init, self.mode, self.mig = visible, init, mode, mig
        if not old:
            self.cuDeviceGetUuid_v2 = self._uuid_v2
        self.attributes = {20: mode, 102: 1, 103: 1, 128: 0}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"undefined symbol: {name}")

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = {100: b"CUDA_ERROR_NO_DEVICE", 1: b"CUDA_ERROR_INVALID_VALUE"}.get(code)
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.visible)
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = 100 + self.visible[index]
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, handle: int) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, handle: int) -> int:
        size._obj.value = 150_000_000_000
        return 0

    def cuDeviceGetUuid(self, buffer: Any, handle: int) -> int:
        buffer.raw = UUIDS[handle - 100]
        return 0

    def _uuid_v2(self, buffer: Any, handle: int) -> int:
        buffer.raw = self.mig or UUIDS[handle - 100]
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, handle: int) -> int:
        if which not in self.attributes:
            return 1
        value._obj.value = self.attributes[which]
        return 0

    def cuDeviceCanAccessPeer(self, value: Any, one: int, other: int) -> int:
        # Pairs on one switch: 0 with 1, 2 with 3, ...
        value._obj.value = int((one - 100) // 2 == (other - 100) // 2)
        return 0


def test_devices_are_named_by_uuid_with_their_peers() -> None:
    answer = gpu_child.ask(FakeCuda([0, 1, 2]))
    assert answer.problem == ""
    first, second, third = answer.devices
    assert first == GpuDevice(
        uuid=TEXTS[0],
        index=0,
        name="NVIDIA H200",
        memory_bytes=150_000_000_000,
        vmm=True,
        posix_fd=True,
        fabric=False,
        peers=(TEXTS[1],),
    )
    assert (second.peers, third.peers) == ((TEXTS[0],), ())


def test_a14_local_indices_under_a_mask_are_other_devices() -> None:
    """CUDA_VISIBLE_DEVICES=4,5,6,7: the driver counts from 0, and the UUIDs are those of 4 to 7."""
    devices = gpu_child.ask(FakeCuda([4, 5, 6, 7])).devices
    assert [(device.index, device.uuid) for device in devices] == list(enumerate(TEXTS[4:]))
    reversed_order = gpu_child.ask(FakeCuda([7, 6])).devices
    assert [(device.index, device.uuid) for device in reversed_order] == [(0, TEXTS[7]), (1, TEXTS[6])]


def test_f11_the_compute_mode_is_read_without_a_context() -> None:
    """The fake has no call that makes one: asking for it would be an AttributeError."""
    assert gpu_child.ask(FakeCuda([0], mode=3)).devices[0].compute_mode == "exclusive-process"
    assert gpu_child.ask(FakeCuda([0], mode=2)).devices[0].compute_mode == "prohibited"
    assert gpu_child.ask(FakeCuda([0])).devices[0].compute_mode == "default"


def test_a_mig_instance_is_named_beside_its_gpu() -> None:
    device = gpu_child.ask(FakeCuda([0], mig=b"\xab" * 16)).devices[0]
    assert (device.uuid, device.mig) == (TEXTS[0], ("MIG-abababab-abab-abab-abab-abababababab",))
    assert gpu_child.ask(FakeCuda([0])).devices[0].mig == ()


def test_an_old_driver_lacks_a_call_and_an_attribute() -> None:
    driver = FakeCuda([0], old=True)
    del driver.attributes[128]
    device = gpu_child.ask(driver).devices[0]
    assert (device.uuid, device.mig, device.fabric, device.vmm) == (TEXTS[0], (), False, True)


@pytest.mark.parametrize(("code", "text"), [(100, "CUDA_ERROR_NO_DEVICE (100)"), (803, "unknown error (803)")])
def test_the_drivers_own_error_is_quoted(code: int, text: str) -> None:
    assert gpu_child.ask(FakeCuda([], init=code)) == Answer(problem=f"cuInit: {text}")


def nodes(root: Path, *names: str, mode: int = 0o666) -> Path:
    for name in names:
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.chmod(mode)
    return root


def said(code: str) -> tuple[str, ...]:
    """A child of our own making in the place of the one that asks the driver."""
    return (sys.executable, "-c", code)


NEVER = ("/nonexistent/never-started",)


def test_without_the_driver_nothing_is_started(tmp_path: Path) -> None:
    found = gpus({}, tmp_path, NEVER)
    assert (found.count, found.problem, found.devices) == (0, "", ())
    assert found.evidence == "no /dev/nvidia* and no NVIDIA driver"


def test_f10_three_problems_that_are_not_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No GPU node, no permission, no driver library."""
    version = tmp_path / "a/proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:07:16 UTC 2025\nGCC 12.3"
    )
    given_none = gpus({}, nodes(tmp_path / "a", "null"), NEVER)
    assert (given_none.count, given_none.driver) == (0, "580.65.06")
    assert given_none.problem.startswith("no GPU node: the driver is loaded")
    half = gpus({}, nodes(tmp_path / "b", "nvidia0"), NEVER)
    assert half.problem == f"no GPU node: {tmp_path}/b/dev/nvidiactl is missing"
    gpu_child.main(nodes(tmp_path / "c", "nvidiactl") / "dev/nvidiactl", "libcuda-that-is-not-there.so.1")
    assert msgspec.json.decode(capsys.readouterr().out, type=Answer).problem.startswith("no driver library: libcuda-")


def test_f10_no_permission_by_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may open everything, so who asks is a fixture: access(2) as it answers to others."""
    root = nodes(tmp_path, "nvidiactl", "nvidia0", "nvidia1", mode=0o660)
    monkeypatch.setattr(os, "access", lambda path, how: False)
    found = gpus({}, root, NEVER)
    assert found.count == 2
    assert found.problem.startswith(f"no permission: {tmp_path}/dev/nvidiactl (mode 0660, owner ")
    # One of several devices may be closed: the driver is asked for the others.
    monkeypatch.setattr(os, "access", lambda path, how: Path(path).name != "nvidia1")
    assert gpus({}, root, said("print('{}')")).problem == ""


def test_f10_no_permission_by_the_containers_device_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mode says yes and open(2) says no; it is the child that tries."""

    def refuse(path: Any, flags: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(os, "open", refuse)
    gpu_child.main(tmp_path / "nvidiactl", "libcuda-that-is-not-there.so.1")
    problem = msgspec.json.decode(capsys.readouterr().out, type=Answer).problem
    assert problem == f"no permission: opening {tmp_path}/nvidiactl: Operation not permitted"


def test_the_real_child_is_asked_where_there_are_nodes(tmp_path: Path) -> None:
    """Here the fixture's files stand for the devices, and the real child finds that there is none."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("a GPU is here")
    found = gpus(dict(os.environ), nodes(tmp_path, "nvidiactl", "nvidia0"))
    assert (found.count, found.devices) == (1, ())
    assert found.problem == "no permission: opening /dev/nvidiactl: No such file or directory"


def test_what_the_child_says_is_taken_over(tmp_path: Path) -> None:
    root = nodes(tmp_path, "nvidiactl", "nvidia0")
    answer = msgspec.json.encode(gpu_child.ask(FakeCuda([0]))).decode()
    found = gpus({"SAID": answer}, root, said("import os; print(os.environ['SAID'])"))
    assert found.uuids == {TEXTS[0]}
    assert (found.count, found.problem) == (1, "")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "was ended by signal 11"),
        ("raise SystemExit('libcuda is broken')", "ended with 1: libcuda is broken"),
        ("print('[1, 2]')", "printed no answer"),
        ("print('')", "printed no answer"),
    ],
)
def test_a_child_that_fails_is_a_problem_and_no_more(tmp_path: Path, code: str, problem: str) -> None:
    found = gpus({}, nodes(tmp_path, "nvidiactl", "nvidia0"), said(code))
    assert problem in found.problem
    assert (found.count, found.devices) == (1, ())


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CHILD_S", 0.3)
    begin = time.monotonic()
    found = gpus({}, nodes(tmp_path, "nvidiactl", "nvidia0"), said("import time; time.sleep(60)"))
    assert found.problem == "the driver gave no answer within 0.3 s"
    assert time.monotonic() - begin < 5
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""


FULL = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-e6a23a2c-1b5c-5d4e-8f4c-2f1e0c1a7b11"
OLD_MIG = f"MIG-{FULL}/1/2"


@pytest.mark.parametrize(
    ("text", "kind", "entries", "stopped_at"),
    [
        (None, "unset", (), ""),
        ("", "none", (), ""),
        ("-1", "none", (), ""),
        ("NoDevFiles", "none", (), ""),
        ("0", "list", ("0",), ""),
        ("4,5,6,7", "list", ("4", "5", "6", "7"), ""),
        (" 1 , 0 ", "list", ("1", "0"), ""),
        ("0,,1", "list", ("0",), "''"),
        ("0,2,-1,1", "list", ("0", "2"), "'-1'"),
        ("-1,0", "none", (), "'-1'"),
        (",0", "none", (), "''"),
        ("0,1,", "list", ("0", "1"), "''"),
        (FULL, "list", (FULL,), ""),
        ("GPU-8932f937", "list", ("GPU-8932f937",), ""),
        ("GPU-8932f937,GPU-a", "list", ("GPU-8932f937", "GPU-a"), ""),
        (MIG, "list", (MIG,), ""),
        (OLD_MIG, "list", (OLD_MIG,), ""),
        # Not CUDA's words, but the toolkit's: CUDA sees a bad entry, and no device.
        ("all", "none", (), "'all'"),
        ("none", "none", (), "'none'"),
        ("cuda:0", "none", (), "'cuda:0'"),
        ("0,GPU-xyz", "list", ("0",), "'GPU-xyz'"),
        ("\udcff", "none", (), "'?'"),
    ],
)
def test_a28_every_form_of_cuda_visible_devices(
    text: str | None, kind: str, entries: tuple[str, ...], stopped_at: str
) -> None:
    mask = parse("CUDA_VISIBLE_DEVICES", text)
    assert (mask.kind, mask.entries, mask.stopped_at) == (kind, entries, stopped_at)
    assert msgspec.json.decode(msgspec.json.encode(mask)) is not None


@pytest.mark.parametrize(
    ("text", "kind", "entries", "stopped_at"),
    [
        (None, "unset", (), ""),
        ("", "none", (), ""),
        ("void", "none", (), ""),
        ("none", "none", (), ""),
        ("all", "all", (), ""),
        ("0,1,2", "list", ("0", "1", "2"), ""),
        ("GPU-fef8089b", "list", ("GPU-fef8089b",), ""),
        ("0:0,0:1", "list", ("0:0", "0:1"), ""),
        (f"{MIG},{OLD_MIG}", "list", (MIG, OLD_MIG), ""),
        ("nvidia.com/gpu=0", "list", ("nvidia.com/gpu=0",), ""),
        ("/var/run/nvidia-container-devices", "list", ("/var/run/nvidia-container-devices",), ""),
        ("0,all", "list", ("0",), "'all'"),
        ("-1", "none", (), "'-1'"),
    ],
)
def test_a28_every_form_of_nvidia_visible_devices(
    text: str | None, kind: str, entries: tuple[str, ...], stopped_at: str
) -> None:
    mask = parse("NVIDIA_VISIBLE_DEVICES", text)
    assert (mask.kind, mask.entries, mask.stopped_at) == (kind, entries, stopped_at)


def test_a40_an_empty_mask_is_not_a_mask_that_is_not_set() -> None:
    cuda, toolkit = masks({"CUDA_VISIBLE_DEVICES": ""})
    assert (cuda.name, cuda.text, cuda.kind) == ("CUDA_VISIBLE_DEVICES", "", "none")
    assert (toolkit.name, toolkit.text, toolkit.kind) == ("NVIDIA_VISIBLE_DEVICES", None, "unset")


ON, OFF = "max_split_size_mb:64, expandable_segments:True", "expandable_segments:False"
UNASKED = types.SimpleNamespace(_C=types.SimpleNamespace())  # a torch that does not tell


@pytest.mark.parametrize(
    ("environ", "expected", "evidence"),
    [
        ({}, False, "none of PYTORCH_CUDA_ALLOC_CONF, PYTORCH_HIP_ALLOC_CONF, PYTORCH_ALLOC_CONF is set"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ON}, True, "PYTORCH_CUDA_ALLOC_CONF='max"),
        ({"PYTORCH_ALLOC_CONF": ON}, True, "PYTORCH_ALLOC_CONF='max"),
        # As torch 2.11 did in a CUDA build.
        ({"PYTORCH_HIP_ALLOC_CONF": ON}, True, "PYTORCH_HIP_ALLOC_CONF='max"),
        ({"PYTORCH_HIP_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": ON}, False, "torch reads PYTORCH_HIP_ALLOC_CONF only"),
        ({"PYTORCH_CUDA_ALLOC_CONF": OFF, "PYTORCH_HIP_ALLOC_CONF": ON}, False, "reads PYTORCH_CUDA_ALLOC_CONF only"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ON, "PYTORCH_ALLOC_CONF": OFF}, True, "torch reads PYTORCH_CUDA_ALLOC_CONF only"),
        ({"PYTORCH_CUDA_ALLOC_CONF": OFF, "PYTORCH_ALLOC_CONF": ON}, False, "torch reads PYTORCH_CUDA_ALLOC_CONF only"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": ON}, False, "PYTORCH_CUDA_ALLOC_CONF=''"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True,expandable_segments:False"}, False, ""),
        ({"PYTORCH_ALLOC_CONF": "not_expandable_segments:True"}, False, ""),
    ],
)
def test_a38_both_names_of_the_allocators_setting(environ: Mapping[str, str], expected: bool, evidence: str) -> None:
    fact = allocator(environ, UNASKED)
    assert fact.expandable_segments is expected
    assert evidence in fact.evidence


@pytest.mark.parametrize(("setting", "expected"), [("", False), (ON, True), (OFF, False)])
def test_a38_a_loaded_torch_knows_better(setting: str, expected: bool) -> None:
    """A program may have changed the setting since it started."""
    torch = types.SimpleNamespace(_C=types.SimpleNamespace(_accelerator_getAllocatorSettings=lambda: setting))
    fact = allocator({"PYTORCH_CUDA_ALLOC_CONF": ON}, torch)
    assert fact.expandable_segments is expected
    assert fact.evidence.startswith(f"torch itself says {setting!r}; PYTORCH_CUDA_ALLOC_CONF=")


def in_use(expandable: bool, *, history: bool = False, started: bool = True) -> Any:
    """A torch of any version, as far as it is asked; 2.11 has no call that tells the setting alone."""
    memory = types.SimpleNamespace(_snapshot=lambda: {"allocator_settings": {"expandable_segments": expandable}})
    cuda = types.SimpleNamespace(is_initialized=lambda: started, memory=memory)
    return types.SimpleNamespace(cuda=cuda, _C=types.SimpleNamespace(_cuda_isHistoryEnabled=lambda: history))


@pytest.mark.parametrize("setting", [True, False])
def test_a38_the_allocator_that_runs_knows_best(setting: bool) -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": OFF if setting else ON}
    fact = allocator(environ, in_use(setting))
    assert fact.expandable_segments is setting
    assert fact.evidence.startswith(f"torch's allocator itself says {setting}; PYTORCH_CUDA_ALLOC_CONF=")
    # It is not asked where the answer would cost seconds, or would start CUDA.
    unasked = allocator(environ, in_use(setting, history=True))
    assert unasked.expandable_segments is not setting
    assert "torch was not asked" in unasked.evidence
    assert allocator(environ, in_use(setting, started=False)).expandable_segments is not setting


def fails() -> str:
    raise RuntimeError("no accelerator")


def test_a38_a_torch_that_cannot_tell() -> None:
    torch = types.SimpleNamespace(_C=types.SimpleNamespace(_accelerator_getAllocatorSettings=fails))
    assert allocator({"PYTORCH_ALLOC_CONF": ON}, torch).expandable_segments
