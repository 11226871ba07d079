"""Reading profiles: Docker's conditions, and bad input."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from syncstack.errors import ProfileError
from syncstack.seccomp.load import DOCKER_CAPABILITIES, RUNTIMES, load, resolve
from syncstack.seccomp.profile import Profile, parse, unknown_fields

ALLOW = "SCMP_ACT_ALLOW"
ALLOWED = {"action": ALLOW}
NATIVE, DOCKER_ARCH = {
    "x86_64": ("SCMP_ARCH_X86_64", "amd64"),
    "aarch64": ("SCMP_ARCH_AARCH64", "arm64"),
}[platform.machine()]


def made(**fields: Any) -> Profile:
    return parse(json.dumps({"defaultAction": "SCMP_ACT_ERRNO", **fields}).encode(), origin="test.json")


def allowed(rule: dict[str, Any], *, caps: tuple[str, ...] = ()) -> bool:
    return bool(resolve(made(syscalls=[{"names": ["bpf"], "action": ALLOW, **rule}]), caps=caps).syscalls)


def test_the_profiles_by_name_and_by_file_are_the_same() -> None:
    for name in ("permissive", "restrictive"):
        assert load(name) == load(str(Path(__file__).parents[2] / "seccomp" / f"{name}.json"))


@pytest.mark.parametrize(
    ("rule", "caps", "applies"),
    [
        ({}, (), True),
        ({"includes": {"caps": ["CAP_BPF"]}}, (), False),
        ({"includes": {"caps": ["CAP_BPF"]}}, ("CAP_BPF",), True),
        ({"includes": {"caps": ["CAP_BPF", "CAP_SYS_ADMIN"]}}, ("CAP_BPF",), False),
        ({"excludes": {"caps": ["CAP_BPF", "CAP_SYS_ADMIN"]}}, ("CAP_BPF",), False),
        ({"excludes": {"caps": ["CAP_BPF"]}}, DOCKER_CAPABILITIES, True),
        ({"includes": {"arches": [DOCKER_ARCH]}}, (), True),
        ({"includes": {"arches": ["s390x"]}}, (), False),
        ({"excludes": {"arches": [DOCKER_ARCH]}}, (), False),
        ({"includes": {"minKernel": "4.8"}}, (), True),
        ({"includes": {"minKernel": "99.0"}}, (), False),
        ({"excludes": {"minKernel": "4.8"}}, (), False),
    ],
)
def test_dockers_conditions(rule: dict[str, Any], caps: tuple[str, ...], applies: bool) -> None:
    assert allowed(rule, caps=caps) is applies


def test_arch_map_becomes_the_native_architectures() -> None:
    entry = {"architecture": NATIVE, "subArchitectures": ["SCMP_ARCH_X86"]}
    other = {"architecture": "SCMP_ARCH_S390X", "subArchitectures": None}
    flat = resolve(made(archMap=[entry, other], syscalls=[]), caps=())
    assert flat.architectures == (NATIVE, "SCMP_ARCH_X86")
    assert flat.arch_map is None


def test_the_old_form_with_one_name() -> None:
    flat = resolve(made(syscalls=[{"name": "read", "action": ALLOW}]), caps=())
    assert flat.syscalls[0].names == ("read",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a seccomp profile"),
        ("[]", "not a seccomp profile"),
        ("{}", "defaultAction"),
        ('{"defaultAction": 1}', "defaultAction"),
        ('{"defaultAction": "SCMP_ACT_ERRNO", "sycalls": []}', "sycalls"),
        ('{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"]}]}', "action"),
        ('{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"action": "SCMP_ACT_ALLOW"}]}', "name or names"),
        ('{"defaultAction": "SCMP_ACT_ERRNO", "archMap": [], "architectures": []}', "archMap"),
        (
            '{"defaultAction": "A", "syscalls": [{"name": "a", "action": "B", "includes": {"minKernel": "x"}}]}',
            "minKernel",
        ),
    ],
)
def test_bad_profiles_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=words):
        load(str(path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="permissive, restrictive"):
        load("strict")


def test_containerd_reads_no_condition_and_docker_20_10_no_default_errno() -> None:
    rule = {"names": ["bpf"], "action": ALLOW, "includes": {"caps": ["CAP_BPF"]}}
    profile = made(defaultErrnoRet=38, archMap=[{"architecture": NATIVE}], syscalls=[rule, {"name": "read", **ALLOWED}])
    docker, old, containerd = (resolve(profile, caps=(), runtime=runtime) for runtime in RUNTIMES)
    assert [rule.names for rule in docker.syscalls] == [("read",)]
    assert (docker.default_errno_ret, old.default_errno_ret) == (38, 1)
    # The old form with one name is not in the OCI specification either.
    assert [rule.names for rule in containerd.syscalls] == [("bpf",), ()]


def test_the_kernel_can_be_given() -> None:
    profile = made(syscalls=[{"names": ["ptrace"], "action": ALLOW, "includes": {"minKernel": "4.8"}}])
    assert not resolve(profile, caps=(), kernel="4.4").syscalls
    assert resolve(profile, caps=(), kernel="4.19.0-26-amd64").syscalls
    with pytest.raises(ProfileError, match="kernel version"):
        resolve(profile, caps=(), kernel="new")


def test_what_podman_writes_is_read_and_typos_are_found() -> None:
    document = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 38,
        "defaultErrno": "ENOSYS",
        "syscalls": [{"names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1, "errno": "EPERM", "include": {}}],
    }
    data = json.dumps(document).encode()
    assert unknown_fields(data) == ("syscalls[0].include",)
    assert parse(data, origin="test.json", strict=False).syscalls[0].errno == "EPERM"
    with pytest.raises(ProfileError, match=r"syscalls\[0\].include"):
        parse(data, origin="test.json")
