"""What the doctor says about memory and limits that users have reported; a test is named by its row in the bug log.

Mounts, limits and filters are real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.unit.doctor_facts import GIB, MEMORY, container, device, gpus, one, troubles
from tests.unit.doctor_real import ROOT, UNPRIVILEGED, doctor, filtered, needs_mounts, needs_unprivileged


@needs_mounts
def test_b01_both_numbers_and_the_flag(tmp_path: Path) -> None:
    """1 MiB really mounted on /dev/shm."""
    mounted = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh")
    check = doctor(*mounted, only=("memory.shm",), folder=tmp_path)["by_id"]["memory.shm"]
    assert check["status"] == "warn"
    assert check["observed"] == "/dev/shm: 1 MiB, 1 MiB free; needed: 64 MiB"
    assert check["remedy"]["compose"].startswith("shm_size: 512m")
    assert "emptyDir: {medium: Memory" in check["remedy"]["kubernetes"]


def test_b06_the_budget_is_the_least() -> None:
    """The mount says 32 GiB, the limit 4 GiB, of which 100 MiB are left."""
    memory = replace(
        MEMORY, shm_bytes=32 * GIB, shm_free_bytes=32 * GIB, available_bytes=60 * GIB, cgroup_limit_bytes=4 * GIB,
        cgroup_headroom_bytes=3 * GIB,
    )  # fmt: skip
    budget = one(container(memory=memory), "memory.budget")
    assert budget.status == "pass"
    expected = (
        "3.0 GiB may still be taken: the least of 60.0 GiB free on the machine and 3.0 GiB below the limit of 4.0 GiB"
    )
    assert budget.observed == expected
    shm = one(container(memory=memory), "memory.shm")
    assert "32.0 GiB free, of which 3.0 GiB can be filled before the container's memory limit" in shm.observed
    short = replace(memory, cgroup_headroom_bytes=100 << 20)
    assert troubles(container(memory=short)) == {"memory.budget": "warn"}


def test_b07_the_side_that_writes_needs_the_memory() -> None:
    budget = one(container(memory=replace(MEMORY, cgroup_headroom_bytes=1 << 20)), "memory.budget")
    assert "counts the weights' memfd to the trainer, which writes it" in budget.consequence
    assert "in the trainer" in budget.remedy.compose
    assert "in the trainer" in budget.remedy.kubernetes


@needs_unprivileged
def test_b14_a_capability_in_the_bounding_set_changes_nothing() -> None:
    """64 KiB, uid 10001, IPC_LOCK in the bounding set; only the GPU is made up."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    )
    show = (
        "from msgspec.structs import replace; import msgspec; from syncstack.facts import collect\n"
        "from tests.unit.doctor_facts import device, gpus, one\n"
        "facts = replace(collect(), gpu=gpus(device()))\n"
        "assert 'CAP_IPC_LOCK' in facts.capabilities.bounding and not facts.capabilities.effective\n"
        "print(msgspec.json.encode(one(facts, 'limits.memlock')).decode())"
    )
    command = [sys.executable, "-c", code, *UNPRIVILEGED, sys.executable, "-c", show]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "warn"
    assert found["observed"].startswith(
        "soft limit 64 KiB, hard limit 64 KiB; CAP_IPC_LOCK was added but is not in force"
    )
    assert "it is a node setting" in found["remedy"]["other"]
    assert found["remedy"]["kubernetes"] == ""
    assert "work meanwhile" in found["consequence"]


def test_b14_in_force_it_lifts_the_limit() -> None:
    capabilities = replace(container().capabilities, effective=("CAP_IPC_LOCK",))
    assert one(container(capabilities=capabilities, gpu=gpus(device())), "limits.memlock").status == "pass"


def test_a_filter_that_refuses_the_reserve_is_told_from_a_full_memory(tmp_path: Path) -> None:
    check = doctor(*filtered(tmp_path, "fallocate", errno=1), only=("memory.memfd",), folder=tmp_path)
    memfd = check["by_id"]["memory.memfd"]
    assert memfd["status"] == "fail"
    assert "EPERM" in memfd["observed"]
    assert memfd["remedy"]["other"].startswith("a profile that allows fallocate")
    full = doctor(*filtered(tmp_path, "fallocate", errno=28), only=("memory.memfd",), folder=tmp_path)
    assert full["by_id"]["memory.memfd"]["remedy"]["compose"].startswith("mem_limit: ")


def test_nofile_that_can_be_raised_is_told_from_a_node_setting() -> None:
    def limited(soft: int, hard: int) -> dict[str, Any]:
        prefix = ("prlimit", f"--nofile={soft}:{hard}", "--")
        return dict(doctor(*prefix, only=("limits.nofile",))["by_id"]["limits.nofile"])

    own, node = limited(256, 4096), limited(256, 256)
    assert own["observed"].startswith("soft limit 256, hard limit 4096, ")
    assert own["remedy"]["other"].startswith("before the command: ulimit -n")
    assert "a pod has no field for it" in node["remedy"]["other"]
    assert own["remedy"]["compose"] == node["remedy"]["compose"] == "ulimits: {nofile: 16384}"


@needs_mounts
def test_a_network_namespace_of_ones_own_has_loopback_only(tmp_path: Path) -> None:
    found = doctor("unshare", "--net", only=("network.interface",), folder=tmp_path)
    observed = "no interface is up but loopback; not needed on one host"
    assert found["by_id"]["network.interface"]["observed"] == observed
