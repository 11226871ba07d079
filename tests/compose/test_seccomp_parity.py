"""`syncstack seccomp run` and Docker give the same answers: the probes' and, read out of the filters themselves, all.

Plain ``docker run --rm``; the code in the containers is this checkout's.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncstack.facts.syscalls import PROBES
from syncstack.seccomp import bpf, builtin, libseccomp
from syncstack.seccomp.check import check as check_profile
from syncstack.seccomp.compile import Reader, samples
from syncstack.seccomp.load import DOCKER_CAPABILITIES, load
from tests.compose.stack import ROOT, check, run

IMAGE = "syncstack/trainer:dev"
ROOT_IMAGE = "debian:bookworm-slim"
CONTAINERD = "/run/docker/containerd/containerd.sock"
OURS = ("permissive", "restrictive")
# Past the newest call of any kernel so far, and far past it.
NUMBERS = (*range(600), 9999)
# What Docker's newest profile answers otherwise than older ones, among the calls that are probed: the release that
# changed it, and why. A difference that is not named here fails.
CHANGED = {
    "process_vm_readv": ("23.0.0", "allowed to all since, on kernels >= 4.8, where ptrace cannot go around a filter"),
    "io_uring_setup": ("25.0.0", "refused since: a ring does its work past every filter"),
}


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    if run("docker", "image", "inspect", IMAGE).returncode:
        pytest.skip(f"the image {IMAGE} is not built (make images)")


@pytest.fixture(scope="module")
def engine() -> str:
    return check("docker", "version", "--format", "{{.Server.Version}}").strip()


def security(profile: str | None) -> list[str]:
    return [] if profile is None else [f"--security-opt=seccomp={ROOT}/seccomp/{profile}.json"]


def verdicts(text: str) -> dict[str, str]:
    return {name: fact["verdict"] for name, fact in json.loads(text)["syscalls"].items()}


def in_docker(profile: str | None, *options: str) -> dict[str, str]:
    """The probes' verdicts in a container; None: no option at all, so the engine's built-in profile."""
    mount = [f"--volume={ROOT}/syncstack:/checkout/syncstack:ro", "--env=PYTHONPATH=/checkout"]
    command = ["docker", "run", "--rm", "--network=none", *options, *security(profile), *mount, "--entrypoint=python"]
    return verdicts(check(*command, IMAGE, "-m", "syncstack.facts", timeout_s=120))


def by_run(profile: str, caps: str = "none") -> dict[str, str]:
    """The same, by ``syncstack seccomp run`` and no container."""
    command = [sys.executable, "-m", "syncstack.cli", "seccomp", "run", profile, "--caps", caps]
    command += ["--", sys.executable, "-m", "syncstack.facts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return verdicts(done.stdout)


@pytest.mark.parametrize("profile", OURS)
def test_our_profiles_answer_alike(profile: str) -> None:
    options = ("--cap-drop=ALL", "--security-opt=no-new-privileges")
    answers = in_docker(profile, *options)
    assert answers == by_run(profile)
    assert answers == by_run(f"{ROOT}/seccomp/{profile}.json")
    assert set(answers) == {probe.name for probe in PROBES}


def test_the_built_in_profile_answers_alike(engine: str) -> None:
    """No option in Docker, so its default capabilities, too."""
    assert in_docker(None) == by_run(f"docker@{engine}", "docker")


@pytest.mark.parametrize("capability", ["CAP_SYS_PTRACE", "CAP_SYS_NICE"])
def test_the_built_in_profile_answers_alike_with_a_capability(engine: str, capability: str) -> None:
    answers = in_docker(None, f"--cap-add={capability}")
    assert answers == by_run(f"docker@{engine}", f"docker,{capability}")
    assert answers != by_run(f"docker@{engine}", "docker"), "the capability changes nothing: compare another"


def test_what_this_engine_does_otherwise_than_the_newest_is_known_by_name(engine: str) -> None:
    here, newest = in_docker(None), by_run("docker", "docker")
    differing = {name for name in here if here[name] != newest[name]}
    release = builtin.release(engine)
    assert differing == {name for name, (since, _) in CHANGED.items() if release < builtin.release(since)}
    for name in differing:
        assert builtin.history(name)[0].startswith(f"before {CHANGED[name][0]}: "), CHANGED[name][1]


# --- the filters themselves


def program_of(pid: int) -> bytes:
    """The one filter of a process, by PTRACE_SECCOMP_GET_FILTER: needs root, and no filter on us."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def ptrace(request: int, address: int = 0, data: int = 0) -> int:
        result: int = libc.ptrace(request, pid, address, data)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    try:
        ptrace(0x4206)  # SEIZE
    except PermissionError as error:
        pytest.skip(f"ptrace of a container's process: {error}")
    ptrace(0x4207)  # INTERRUPT
    os.waitpid(pid, 0x40000000)
    try:
        length = ptrace(0x420C)
        buffer = ctypes.create_string_buffer(8 * length)
        ptrace(0x420C, 0, ctypes.addressof(buffer))
        with pytest.raises(FileNotFoundError):
            ptrace(0x420C, 1)
        return buffer.raw
    except OSError as error:
        pytest.skip(f"PTRACE_SECCOMP_GET_FILTER: {error}")
    finally:
        ptrace(17)  # DETACH


@pytest.fixture
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[bpf.Instruction, ...]]:
    """The program that Docker loaded for a container with these options."""
    name = f"syncstack-parity-{os.getpid()}"
    options = ["--detach", "--rm", f"--name={name}", "--network=none", *request.param, "--entrypoint=sleep"]
    check("docker", "run", *options, IMAGE, "120", timeout_s=120)
    try:
        pid = int(check("docker", "inspect", "--format", "{{.State.Pid}}", name))
        if not Path(f"/proc/{pid}/status").exists():
            pytest.skip("the engine's processes are not this kernel's: a remote engine")
        yield bpf.instructions(program_of(pid))
    finally:
        check("docker", "rm", "--force", name)


def differences(program: tuple[bpf.Instruction, ...], reader: Reader) -> list[Any]:
    """Every number, and for those with rules on arguments a value on each side of every rule."""
    found = []
    for number in NUMBERS:
        name = libseccomp.name_of(number, libseccomp.native()) or str(number)
        for args in samples(name, [reader]):
            docker = bpf.answer(program, number=number, arch=libseccomp.native(), args=args)
            ours = reader.of_number(number, args)
            if docker != ours:
                found.append((name, args, docker, ours))
    return found


@pytest.mark.parametrize(
    ("loaded", "capabilities"),
    [
        ([], ()),
        *(([f"--cap-add={cap}"], (f"CAP_{cap}",)) for cap in ("SYS_PTRACE", "SYS_NICE", "SYS_ADMIN", "SYS_TIME")),
    ],
    indirect=["loaded"],
    ids=["default", "SYS_PTRACE", "SYS_NICE", "SYS_ADMIN", "SYS_TIME"],
)
def test_the_built_in_filter_is_the_model(
    loaded: tuple[bpf.Instruction, ...], capabilities: tuple[str, ...], engine: str
) -> None:
    """Not the probes alone: every system call."""
    model = load(f"docker@{engine}", caps=(*DOCKER_CAPABILITIES, *capabilities))
    assert differences(loaded, Reader(model)) == []


@pytest.mark.parametrize(
    ("loaded", "profile"), [(security(profile), profile) for profile in OURS], indirect=["loaded"], ids=OURS
)
def test_our_filter_in_docker_is_the_one_that_run_loads(
    loaded: tuple[bpf.Instruction, ...], profile: str, engine: str
) -> None:
    """But for what Docker before 23.0 drops: the default errno, seen by personality and by numbers of no call."""
    found = differences(loaded, Reader(load(profile)))
    if builtin.release(engine) >= (23, 0, 0):
        assert found == []
        return
    assert {docker for _, _, docker, _ in found} == {"EPERM"}
    assert {ours for *_, ours in found} == {"ENOSYS"}
    assert {name for name, *_ in found if not name.isdigit()} == {"personality"}
    assert differences(loaded, Reader(load(profile, runtime="docker-20.10"))) == []


@pytest.fixture
def in_containerd(tmp_path: Path) -> Iterator[tuple[bpf.Instruction, ...]]:
    """The program that containerd has runc load for Docker's built-in profile, given to it as a file."""
    if shutil.which("ctr") is None or not Path(CONTAINERD).exists():
        pytest.skip(f"needs ctr, and Docker's own containerd at {CONTAINERD}")
    if run("docker", "image", "inspect", ROOT_IMAGE).returncode:
        pytest.skip(f"the image {ROOT_IMAGE} is not here")
    name = f"syncstack-parity-{os.getpid()}"
    ctr = ("ctr", "--address", CONTAINERD, "--namespace", name)
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(builtin.docker()))
    (tmp_path / "root").mkdir()
    check("docker", "create", f"--name={name}", ROOT_IMAGE)
    try:
        check("sh", "-c", f"docker export {name} | tar --extract --directory {tmp_path}/root", timeout_s=120)
    finally:
        check("docker", "rm", name)
    options = ["--detach", "--rootfs", "--seccomp", f"--seccomp-profile={tmp_path}/profile.json"]
    check(*ctr, "run", *options, f"{tmp_path}/root", name, "/bin/sleep", "120")
    try:
        (line,) = [line for line in check(*ctr, "task", "ls").splitlines() if line.startswith(name)]
        yield bpf.instructions(program_of(int(line.split()[1])))
    finally:
        check(*ctr, "task", "rm", "--force", name)
        check(*ctr, "container", "rm", name)
        check("ctr", "--address", CONTAINERD, "namespace", "rm", name)
        shutil.rmtree(tmp_path / "root")


def test_containerd_reads_docker_format_as_we_say(in_containerd: tuple[bpf.Instruction, ...], tmp_path: Path) -> None:
    """The claim that `check` warns of: the conditions are dropped, and what they guard is open to all."""
    path = str(tmp_path / "profile.json")
    assert differences(in_containerd, Reader(load(path, runtime="containerd"))) == []
    (reading,) = check_profile(path, caps=(), runtimes=["containerd"]).readings
    opened = [call for finding in reading.findings if finding.kind == "opened" for call in finding.calls]
    assert {"mount", "unshare", "bpf", "init_module"} <= set(opened)
    for call in opened:
        number = libseccomp.number_of(call.partition("(")[0])
        args = (0x10000000,) if call == "clone(CLONE_NEWUSER)" else ()
        assert bpf.answer(in_containerd, number=number or 0, arch=libseccomp.native(), args=args) == "allow", call
