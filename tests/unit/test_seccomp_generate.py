"""The generated files: flat, committed as generated, and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncstack.errors import ProfileError
from syncstack.seccomp import generate
from syncstack.seccomp.table import PROFILES, ProfileName

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("profile", PROFILES)
def test_only_keys_of_the_oci_specification(profile: ProfileName) -> None:
    document = json.loads(generate.render(profile))
    assert set(document) == {"defaultAction", "defaultErrnoRet", "architectures", "syscalls"}
    assert document["defaultErrnoRet"] == 38
    assert document["architectures"] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"]
    for rule in document["syscalls"]:
        assert set(rule) <= {"names", "action", "errnoRet", "args"}
        # Docker 20.10 reads no defaultErrnoRet: each refusal carries its errno itself.
        assert ("errnoRet" in rule) == (rule["action"] == "SCMP_ACT_ERRNO")
        for arg in rule.get("args", ()):
            assert set(arg) <= {"index", "value", "valueTwo", "op"}


@pytest.mark.parametrize("profile", PROFILES)
def test_clone_is_masked_for_every_namespace_flag(profile: ProfileName) -> None:
    rules = [rule for rule in generate.document(profile)["syscalls"] if rule["names"] == ["clone"]]
    allowed = [rule["args"] for rule in rules if rule["action"] == "SCMP_ACT_ALLOW"]
    assert allowed == [[{"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]]
    refused = [rule["args"][0]["value"] for rule in rules if rule["action"] == "SCMP_ACT_ERRNO"]
    assert sum(refused) == 0x7E020000


@pytest.mark.parametrize("profile", PROFILES)
def test_socket_families(profile: ProfileName) -> None:
    rules = [rule for rule in generate.document(profile)["syscalls"] if rule["names"] == ["socket"]]
    allowed = {rule["args"][0]["value"] for rule in rules if rule["action"] == "SCMP_ACT_ALLOW"}
    assert {1, 2, 10, 16, 17} <= allowed  # unix, inet, inet6, netlink, packet
    assert allowed.isdisjoint({38, 40})  # alg, vsock


def test_the_committed_files_are_up_to_date() -> None:
    generate.verify(REPOSITORY / "seccomp")


def test_verify_names_the_file_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"permissive\.json is missing"):
        generate.verify(tmp_path)
    first, second = generate.write(tmp_path / "made")
    generate.verify(tmp_path / "made")
    before = second.read_bytes()
    generate.write(tmp_path / "made")
    assert second.read_bytes() == before
    first.write_bytes(first.read_bytes().replace(b'"ptrace"', b'"ptrase"'))
    with pytest.raises(ProfileError) as error:
        generate.verify(tmp_path / "made")
    assert "permissive.json differs" in str(error.value)
    assert f"syncstack seccomp generate --out {tmp_path / 'made'}" in str(error.value)
    assert error.value.exit_code == 2
