"""What the doctor says about faults that users have reported; each test is named by its row in the bug log.

The cause is made for real where this kernel can. Yama, a security module, gVisor and GPUs cannot be had here: those
tests feed facts as the probes write them, through the probes' own readers where these take a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from syncstack.doctor.examine import diagnose
from syncstack.facts import AllocatorFact, Facts, Guess, TargetFact, process
from syncstack.facts.identity import yama
from syncstack.facts.target import Claim, probe_target
from tests.unit.doctor_facts import (
    GIB,
    IDENTITY,
    MEMORY,
    SHARED,
    child,
    container,
    device,
    gpus,
    one,
    troubles,
)

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


NON_DUMPABLE = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"


@needs_powerless
def test_a02_a_ptrace_rule_is_no_filter_and_no_capability_is_advised() -> None:
    """Two processes of one user without capabilities, the sender not dumpable: EPERM with no filter at all."""
    target = sleeper(NON_DUMPABLE, *POWERLESS)
    code = (
        "import msgspec; from tests.unit.test_doctor_rows import peer\n"
        f"print(msgspec.json.encode(peer({target.pid}, 0)).decode())"
    )
    try:
        done = subprocess.run(
            [*POWERLESS, sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        found = TargetFact(**json.loads(done.stdout))
    finally:
        end(target)
    outcome = one(container("permissive", child=found, socket_dir=NO_FOLDER), "seccomp.pidfd-getfd")
    assert outcome.status == "warn"
    assert "EPERM" in outcome.observed
    assert "forbidden by the ptrace rule, not by a filter" in outcome.observed
    assert "CAP_" not in f"{outcome.remedy.other}{outcome.remedy.compose}{outcome.remedy.kubernetes}"
    assert "seccomp" not in outcome.remedy.compose


@needs_powerless
def test_a02_the_process_that_hides_is_told_so_itself() -> None:
    code = f"{NON_DUMPABLE}\nfrom syncstack.cli import app\napp(['doctor', '--only', 'ptrace.dumpable'])"
    done = subprocess.run(
        [*POWERLESS, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert "warning ptrace.dumpable" in done.stdout, done.stderr
    assert "prctl(PR_GET_DUMPABLE) is not 1" in done.stdout


def test_a04_a_wrong_number_is_no_matter_of_permission() -> None:
    target = sleeper()
    try:
        found = peer(target.pid, 999)
    finally:
        end(target)
    assert found.cause == "bad-descriptor"
    outcome = one(container("permissive", child=found, socket_dir=NO_FOLDER), "seccomp.pidfd-getfd")
    assert "EBADF" in outcome.observed
    assert "no matter of permission" in outcome.observed
    assert not outcome.observed.startswith("denied")
    assert outcome.remedy.compose == outcome.remedy.kubernetes == ""


@pytest.mark.parametrize(("errno", "word"), [(1, "denied"), (38, "absent")])
def test_a30_forbidden_and_not_there_are_two_verdicts(tmp_path: Path, errno: int, word: str) -> None:
    prefix = filtered(tmp_path, "pidfd_getfd", errno=errno)
    check = doctor(*prefix, only=("seccomp.pidfd-getfd",), folder=tmp_path)["by_id"]["seccomp.pidfd-getfd"]
    assert check["observed"].startswith(f"{word}: ")
    # This kernel has the call, so the filter hides it; what cannot be had here is the sandbox itself.
    assert "forbidden by the seccomp filter" in check["observed"]


def test_a30_a_sandbox_is_named_and_a_copy_is_no_failure() -> None:
    facts = container(
        runtime=Guess(value="gvisor", evidence="/proc/version names gVisor"), child=child("absent", "sandbox", "ENOSYS")
    )
    assert troubles(facts) == {"kernel.sandbox": "warn"}
    assert "a sandbox whose kernel has no such call" in one(facts, "seccomp.pidfd-getfd").observed
    assert "copied" in one(facts, "kernel.sandbox").consequence


SCOPES = {
    0: ("pass", ""),
    1: ("warn", "trainer: prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); engine: nothing to change"),
    2: (
        "warn",
        "only a process with CAP_SYS_PTRACE may read another; do not add it: trainer and engine: share a folder",
    ),
    3: ("warn", "nobody may read another process until the node restarts: trainer and engine: share a folder"),
}


def yama_facts(root: Path) -> Facts:
    """Return facts without a folder, and with what the probe reads below ``root``. There is no Yama in this kernel."""
    found = yama(root)
    identity = replace(IDENTITY, yama_scope=found.scope, yama_evidence=found.evidence)
    return container("permissive", identity=identity, socket_dir=NO_FOLDER)


@pytest.mark.parametrize("scope", SCOPES)
def test_a31_each_scope_has_a_line_for_both_sides(tmp_path: Path, scope: int) -> None:
    path = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
    path.parent.mkdir(parents=True)
    path.write_text(f"{scope}\n")
    status, advice = SCOPES[scope]
    outcome = one(yama_facts(tmp_path), "ptrace.yama")
    assert outcome.status == status
    assert f"ptrace_scope: {scope}" in outcome.observed
    assert advice in outcome.remedy.other
    others = [text for other, (_, text) in SCOPES.items() if other != scope and text]
    assert not any(text in outcome.remedy.other for text in others)


def test_a31_a_file_that_is_absent_is_no_error(tmp_path: Path) -> None:
    outcome = one(yama_facts(tmp_path), "ptrace.yama")
    assert outcome.status == "pass"
    assert "absent" in outcome.observed


def test_a31_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").mkdir(parents=True)  # root reads any file, but no folder
    outcome = one(yama_facts(tmp_path), "ptrace.yama")
    assert outcome.status == "pass"
    assert "Is a directory" in outcome.observed


def test_a33_that_ptrace_works_says_nothing(tmp_path: Path) -> None:
    found = doctor(*filtered(tmp_path, "pidfd_getfd", errno=1), folder=tmp_path)
    assert found["facts"]["syscalls"]["ptrace"]["verdict"] == "ok"
    assert found["by_id"]["seccomp.pidfd-getfd"]["observed"].startswith("denied: ")


def spoken(facts: Facts) -> str:
    """Return everything that a user is advised to do."""
    checks = diagnose(facts).checks
    return "\n".join(f"{one.remedy.other}\n{one.remedy.compose}\n{one.remedy.kubernetes}" for one in checks)


def test_a36_a_rootless_user_is_never_sent_to_host_namespaces() -> None:
    remapped = replace(IDENTITY, uid_map="0 1000 1\n1 100000 65536", gid_map="0 1000 1\n1 100000 65536")
    for cause in ("seccomp", "pid-namespace", "user-namespace", "uid"):
        facts = container(identity=remapped, socket_dir=NO_FOLDER, child=child("denied", cause))  # type: ignore[arg-type]
        assert "host" not in spoken(facts).lower().replace("localhost", "").replace("hostusers: false stays", "")
    namespace = one(container(identity=remapped), "privileges.user-namespace")
    assert namespace.status == "pass"
    assert "uid 10001 is 110000 outside" in namespace.observed
    # Root inside is nobody in particular outside: no reason to warn.
    assert one(container(identity=remapped, uid=0), "privileges.user").status == "pass"
    assert one(container(identity=IDENTITY, uid=0), "privileges.user").status == "warn"


@needs_users
def test_a36_a_real_user_namespace_is_seen(tmp_path: Path) -> None:
    check = doctor("unshare", "--map-root-user", only=("privileges.user-namespace",), folder=tmp_path)
    observed = check["by_id"]["privileges.user-namespace"]["observed"]
    assert observed.startswith(f"a rootless or remapped engine: uid 0 is {os.getuid()} outside (uid_map: 0 ")


@needs_powerless
def test_a37_without_any_capability_there_is_a_way_and_it_is_said(tmp_path: Path) -> None:
    found = doctor(*POWERLESS, *CLI, "seccomp", "run", "restrictive", "--", folder=tmp_path)
    assert found["facts"]["capabilities"]["bounding"] == []
    assert found["by_id"]["socket.dir"]["status"] == "pass"
    assert "forbidden by the seccomp filter" in found["by_id"]["seccomp.pidfd-getfd"]["observed"]
    assert "SYS_PTRACE" not in json.dumps([check["remedy"] for check in found["checks"]])


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


def test_a38_the_setting_is_shown_as_the_process_has_it() -> None:
    allocator = AllocatorFact(expandable_segments=True, evidence="PYTORCH_ALLOC_CONF=expandable_segments:True")
    memory = replace(MEMORY, memlock_soft_bytes=None)
    gpu = gpus(device(), allocator=allocator)
    refused = one(container(memory=memory, gpu=gpu), "gpu.allocator")
    assert refused.status == "warn"
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in refused.observed
    assert "sleep mode" in refused.consequence
    assert "PYTORCH_CUDA_ALLOC_CONF" in refused.remedy.compose
    assert "PYTORCH_ALLOC_CONF" in refused.remedy.compose.replace("PYTORCH_CUDA_ALLOC_CONF", "")
    assert troubles(container("permissive", memory=memory, gpu=gpu)) == {}


def test_a39_the_missing_channel_is_named_and_not_memory() -> None:
    memory = replace(MEMORY, memlock_soft_bytes=None)
    outcome = one(container(memory=memory, gpu=gpus(device(fabric=False))), "gpu.handles")
    assert outcome.status == "pass"
    assert "no IMEX channel: no memory is missing" in outcome.observed
    assert outcome.remedy.compose == 'devices: ["/dev/nvidia-caps-imex-channels/channel0"]'


@pytest.mark.parametrize("mode", ["exclusive-process", "prohibited"])
def test_f11_a_gpu_for_one_process_cannot_be_shared(mode: str) -> None:
    memory = replace(MEMORY, memlock_soft_bytes=None)
    outcome = one(container(memory=memory, gpu=gpus(device(compute_mode=mode))), "gpu.compute-mode")
    assert outcome.status == "warn"
    assert outcome.observed == f"GPU 0 (NVIDIA H200): {mode}"
    assert "nvidia-smi -c DEFAULT" in outcome.remedy.other
    assert "MPS" in outcome.remedy.other


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
