"""Facts: what is collected here for real, and how files of other machines are read."""

from __future__ import annotations

import errno
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from syncstack.facts import Facts, collect
from syncstack.facts.cgroup import cgroup
from syncstack.facts.folder import mount_point, probe_folder
from syncstack.facts.process import capabilities, capability_names, namespaces, runtime, status
from syncstack.facts.syscalls import PROBES, Probe, run_probe, verdict_of
from syncstack.seccomp.expected import expected

# One line of mountinfo each: a named volume of Docker, and a root of containerd.
VOLUME = "812 790 254:1 /var/lib/docker/volumes/s/_data /run/syncstack rw,nosuid - ext4 /dev/vda1 rw"
ROOT = "790 600 0:52 / / ro,relatime - overlay overlay rw,lowerdir=/var/lib/containerd/{mark}/1"


def put(root: Path, **files: str) -> Path:
    """Write files below ``root``; "__" stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def open_descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_collect_is_quick() -> None:
    """Each time in a fresh process, where nothing is cached."""
    code = "import time; from syncstack.facts import collect; start = time.perf_counter(); collect(); "
    code += "print(time.perf_counter() - start)"
    argv = [sys.executable, "-c", code]
    runs = [subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout for _ in range(5)]
    median = statistics.median(float(text) for text in runs)
    print(f"collect(): {median * 1000:.1f} ms, median of {len(runs)}")
    if collect().gpu.count:
        pytest.skip("with a GPU the driver is asked, which may take seconds")
    assert median < 0.3


def test_facts_survive_json() -> None:
    facts = collect()
    assert msgspec.json.decode(msgspec.json.encode(facts), type=Facts) == facts
    assert (facts.uid, facts.gid, facts.pid) == (os.getuid(), os.getgid(), os.getpid())
    assert facts.pidfd_getfd is facts.syscalls["pidfd_getfd"]
    assert facts.namespaces["pid"] == str(Path("/proc/self/ns/pid").stat().st_ino)
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_collect_changes_nothing() -> None:
    before = open_descriptors()
    links = namespaces()
    collect()
    assert open_descriptors() == before
    assert namespaces() == links
    assert status()["TracerPid"] == "0"


def test_the_module_prints_json_and_imports_no_torch() -> None:
    code = (
        "import runpy, sys; runpy.run_module('syncstack.facts', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    facts = json.loads(done.stdout)
    assert set(facts["syscalls"]) == {probe.name for probe in PROBES} == set(expected("unconfined"))


def test_answers_agree_with_the_filter_that_is_in_force() -> None:
    facts = collect()
    if facts.seccomp_mode:
        pytest.skip("a filter is in force already; the profile tests say what must be answered")
    # An old kernel refuses bpf by itself; this test runs on new ones too, where nothing may be refused.
    refused = {name for name, fact in facts.syscalls.items() if fact.verdict == "denied"}
    assert refused <= {"bpf", "userfaultfd", "io_uring_setup"}
    assert facts.pidfd_getfd.evidence == "pidfd_getfd(-1, 0, 0) = EBADF"


@pytest.mark.parametrize(
    ("result", "code", "verdict"),
    [
        (0, 0, "ok"),
        (-1, errno.EBADF, "ok"),
        (-1, errno.EFAULT, "ok"),
        (-1, errno.ESRCH, "ok"),
        (-1, errno.EPERM, "denied"),
        (-1, errno.EACCES, "denied"),
        (-1, errno.ENOSYS, "absent"),
    ],
)
def test_verdicts(result: int, code: int, verdict: str) -> None:
    assert verdict_of(result, code) == verdict


def test_evidence_says_who_refused() -> None:
    absent = Probe(name="none", x86_64=9999, aarch64=9999, args=(), shown="none()")
    assert (
        run_probe(absent, seccomp_mode=0).evidence == "none() = ENOSYS; no filter is loaded: the kernel itself says so"
    )
    assert "a filter that hides it, or kernel" in run_probe(absent, seccomp_mode=2).evidence


def test_capability_names() -> None:
    assert capability_names(0) == ()
    assert capability_names(1 << 19 | 1) == ("CAP_CHOWN", "CAP_SYS_PTRACE")
    assert capability_names(1 << 40 | 1 << 41) == ("CAP_CHECKPOINT_RESTORE", "CAP_41")
    found = capabilities({"CapEff": "0000000000080000", "CapBnd": "00000000a80425fb"})
    assert found.effective == ("CAP_SYS_PTRACE",)
    assert len(found.bounding) == 14
    assert found.ambient == ()


@pytest.mark.parametrize(
    ("files", "value"),
    [
        ({}, "none"),
        ({"proc__version": "Linux version 4.4.0 (gVisor)"}, "gvisor"),
        ({"run__.containerenv": ""}, "podman"),
        ({".dockerenv": ""}, "docker"),
        ({"proc__self__cgroup": "0::/kubepods.slice/pod1"}, "kubernetes"),
        ({"proc__self__mountinfo": ROOT.format(mark="io.containerd.snapshotter.v1.overlayfs")}, "containerd"),
    ],
)
def test_runtime_guess(tmp_path: Path, files: dict[str, str], value: str) -> None:
    guess = runtime(put(tmp_path, **files))
    assert guess.value == value
    assert guess.evidence


def v1(limit: int, usage: int, inactive: int = 0) -> dict[str, str]:
    stat = f"cache 5000\ntotal_inactive_file {inactive}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n", "memory.stat": stat}


def v2(limit: str, usage: int) -> dict[str, str]:
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": "anon 1\ninactive_file 100\n"}


UNLIMITED = 9223372036854771712


def test_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    """The path is the host's, and without a cgroup namespace nothing in the container has that name."""
    root = put(tmp_path, proc__self__cgroup="5:memory:/docker/abc\n1:name=systemd:/docker/abc")
    put(root / "sys/fs/cgroup/memory", **v1(1000, 400))
    found = cgroup(root)
    assert (found.version, found.limit, found.headroom) == ("v1", 1000, 600)
    assert found.evidence.endswith("sys/fs/cgroup/memory/memory.limit_in_bytes: 1000")


def test_cgroup_v1_nested_below_what_is_mounted(tmp_path: Path) -> None:
    """Each group on the way up counts: the least limit and the least headroom are of different ones here."""
    mount = "36 32 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
    root = put(tmp_path, proc__self__cgroup="5:cpu,memory:/docker/abc/job/task", proc__self__mountinfo=mount)
    base = root / "sys/fs/cgroup/memory"
    put(base / "job/task", **v1(2000, 100))
    put(base / "job", **v1(5000, 4900, inactive=300))
    put(base, **v1(UNLIMITED, 9000))
    found = cgroup(root)
    assert (found.version, found.limit, found.headroom) == ("v1", 2000, 400)
    assert found.evidence.endswith("memory/job/task/memory.limit_in_bytes: 2000")


def test_cgroup_v1_without_a_limit(tmp_path: Path) -> None:
    root = put(tmp_path, proc__self__cgroup="5:memory:/")
    put(root / "sys/fs/cgroup/memory", **v1(UNLIMITED, 400))
    found = cgroup(root)
    assert (found.version, found.limit, found.headroom) == ("v1", None, None)


@pytest.mark.parametrize(("limit", "found"), [("2000", (2000, 1600)), ("max", (None, None)), ("400", (400, 0))])
def test_cgroup_v2(tmp_path: Path, limit: str, found: tuple[int | None, int | None]) -> None:
    root = put(tmp_path, proc__self__cgroup="0::/a.slice")
    put(root / "sys/fs/cgroup/a.slice", **v2(limit, 500))
    assert (cgroup(root).version, cgroup(root).limit, cgroup(root).headroom) == ("v2", *found)


def test_cgroup_v2_outside_of_its_own_namespace(tmp_path: Path) -> None:
    mount = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    root = put(tmp_path, proc__self__cgroup="0::/../../other", proc__self__mountinfo=mount)
    put(root / "sys/fs/cgroup", **v2("3000", 1000))
    assert (cgroup(root).limit, cgroup(root).headroom) == (3000, 2100)


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    found = cgroup(tmp_path)
    assert (found.version, found.limit, found.evidence) == ("none", None, "no cgroup memory limit to be read")


def test_mount_point_is_the_longest_that_holds_the_path() -> None:
    text = f"{ROOT}\n{VOLUME}\nbroken line"
    assert mount_point(Path("/run/syncstack"), text) == ("/run/syncstack", "ext4")
    assert mount_point(Path("/run/syncstack/engine-0"), text) == ("/run/syncstack", "ext4")
    assert mount_point(Path("/run/syncstack2"), text) == ("/", "overlay")
    assert mount_point(Path("/x"), "") == ("/", "")


def test_a_folder_that_works(tmp_path: Path) -> None:
    fact = probe_folder(tmp_path, mountinfo=f"1 1 0:1 / {tmp_path} rw - tmpfs tmpfs rw")
    assert (fact.exists, fact.writable, fact.mounted) == (True, True, True)
    assert list(tmp_path.iterdir()) == []
    assert not probe_folder(tmp_path, mountinfo=ROOT).mounted


def test_folders_that_do_not_work(tmp_path: Path) -> None:
    assert "does not exist" in probe_folder(tmp_path / "absent").evidence
    put(tmp_path, file="")
    assert "is not a folder" in probe_folder(tmp_path / "file").evidence
    # A socket's path has 108 bytes at most, and not even root may make files in /proc.
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    assert not probe_folder(deep).writable
    assert probe_folder(deep).exists
    assert not probe_folder(Path("/proc")).writable
