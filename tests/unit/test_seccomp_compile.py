"""What a profile answers, read out of the program that libseccomp compiles."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest

from syncstack.errors import ProfileError, UsageError
from syncstack.seccomp import bpf, builtin, libseccomp
from syncstack.seccomp.compile import UNKNOWN, Reader, compile_profile, samples
from syncstack.seccomp.expected import expected
from syncstack.seccomp.load import DOCKER_CAPABILITIES, load, resolve
from syncstack.seccomp.needs import DANGERS, NEEDS
from syncstack.seccomp.profile import parse
from syncstack.seccomp.table import PROFILES, ROWS, Answer, ProfileName

WORDS = {Answer.ALLOW: "allow", Answer.EPERM: "EPERM", Answer.ENOSYS: "ENOSYS"}
ALLOW = {"action": "SCMP_ACT_ALLOW"}
ERRNO = {"action": "SCMP_ACT_ERRNO"}
MASKED = {"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}


def reader(*rules: dict[str, Any], default: str = "SCMP_ACT_ERRNO", **fields: Any) -> Reader:
    data = json.dumps({"defaultAction": default, "syscalls": rules, **fields}).encode()
    return Reader(resolve(parse(data, origin="test.json"), caps=()))


@pytest.mark.parametrize("profile", PROFILES)
def test_the_compiled_profiles_answer_what_the_table_says(profile: ProfileName) -> None:
    compiled = Reader(load(profile))
    for row in ROWS:
        for name in row.names:
            assert compiled.answers(name) == {WORDS[row.answer(profile)]}, name
    assert compiled.of_number(UNKNOWN) == "ENOSYS"


@pytest.mark.parametrize("profile", PROFILES)
def test_rules_on_arguments_are_decided(profile: ProfileName) -> None:
    compiled = Reader(load(profile))
    assert compiled.answers("clone") == {"allow", "EPERM"}
    assert compiled.answers("clone", (0x003D0F00,)) == {"allow"}
    assert compiled.answers("clone", (0x10000011,)) == {"EPERM"}
    families = {family: compiled.answers("socket", (family,)) for family in (1, 2, 38, 40, 46, 1 << 40)}
    assert [family for family, answer in families.items() if answer == {"allow"}] == [1, 2]
    assert compiled.answers("personality", (0xFFFFFFFF,)) == {"allow"}


def test_the_first_plain_rule_counts_and_beats_rules_on_arguments() -> None:
    """What libseccomp does, so what containerd makes of a profile whose conditions it drops."""
    twice = reader({"names": ["clone3"], **ALLOW}, {"names": ["clone3"], **ERRNO, "errnoRet": 38})
    assert twice.answers("clone3") == {"allow"}
    mixed = reader({"names": ["clone"], **ALLOW, "args": [MASKED]}, {"names": ["clone"], **ALLOW})
    assert mixed.answers("clone", (0x10000000,)) == {"allow"}


def test_conditions_on_one_argument_are_alternatives() -> None:
    args = [{"index": 0, "value": value, "op": "SCMP_CMP_EQ"} for value in (1, 2)]
    found = reader({"names": ["socket"], **ALLOW, "args": args})
    assert [min(found.answers("socket", (family,))) for family in (1, 2, 3)] == ["allow", "allow", "EPERM"]


def test_samples_lie_on_both_sides_of_every_condition() -> None:
    found = reader({"names": ["socket"], **ALLOW, "args": [{"index": 1, "value": 5, "op": "SCMP_CMP_LT"}]})
    assert {args[1] for args in samples("socket", [found])} >= {4, 5, 6}
    assert found.answers("socket") == {"allow", "EPERM"}


@pytest.mark.parametrize("default", ["SCMP_ACT_ERRNO", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_TRAP"])
def test_numbers_above_the_highest_named_answer_enosys(default: str) -> None:
    """runc's stub is there under every default that refuses."""
    found = reader({"names": ["read", "kcmp"], **ALLOW}, default=default)
    highest = libseccomp.number_of("kcmp")
    assert highest == found.compiled.highest
    assert [found.of_number(highest + 1), found.of_number(UNKNOWN)] == ["ENOSYS", "ENOSYS"]
    assert found.answers("write") == {{"SCMP_ACT_ERRNO": "EPERM", "SCMP_ACT_TRAP": "trap"}.get(default, "kill")}


def test_a_default_that_allows_has_no_stub() -> None:
    assert reader({"names": ["ptrace"], **ERRNO}, default="SCMP_ACT_LOG").of_number(UNKNOWN) == "log"


def test_another_architecture_ends_the_process() -> None:
    code = compile_profile(load("restrictive")).code
    assert bpf.answer(bpf.instructions(code), number=0, arch=0x40000003) == "kill"
    if platform.machine() == "x86_64":
        assert Reader(load("restrictive")).of_number(0x40000000 + 39) == "kill"


def test_names_that_libseccomp_does_not_know_are_split_by_what_that_means() -> None:
    allowing = compile_profile(reader({"names": ["ptrase"], **ERRNO}, default="SCMP_ACT_ALLOW").profile)
    assert (allowing.not_denied, allowing.skipped) == (("ptrase",), ())
    refusing = compile_profile(reader({"names": ["raed"], **ALLOW}).profile)
    assert (refusing.not_denied, refusing.skipped) == ((), ("raed",))


@pytest.mark.parametrize("fields", [{"architectures": ["SCMP_ARCH_Z80"]}, {"default": "SCMP_ACT_NONE"}])
def test_what_libseccomp_refuses_is_a_profile_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ProfileError):
        reader({"names": ["read"], **ALLOW}, **fields)


def test_not_a_filter_is_said() -> None:
    with pytest.raises(ValueError, match="0x7"):
        bpf.answer([(0x07, 0, 0, 0)], number=0, arch=0)


@pytest.mark.parametrize("engine", ["20.10.24", "23.0.6", "24.0.9", "25.0.0", "28.5.1"])
def test_dockers_built_in_profile_agrees_with_the_table_of_expectations(engine: str) -> None:
    """Two independent tables: the model by release, and what the probes must see."""
    compiled = Reader(load(f"docker@{engine}", caps=DOCKER_CAPABILITIES))
    words = {"allow": "ok", "EPERM": "denied", "ENOSYS": "absent"}
    rows = expected("docker-default", engine=engine)
    assert {name: words[min(compiled.answers(name))] for name in rows} == dict(rows)


def test_dockers_releases() -> None:
    def answer(engine: str, name: str, *args: int) -> str:
        return min(Reader(load(f"docker@{engine}")).answers(name, args))

    assert [answer(engine, "name_to_handle_at") for engine in ("20.10.25", "20.10.26", "23.0.6", "23.0.7")] == [
        "EPERM", "allow", "EPERM", "allow",
    ]  # fmt: skip
    # A fix went into two branches, and not into the one between them.
    assert [answer(engine, "fchmodat2") for engine in ("23.0.10", "24.0.9", "25.0.3")] == ["allow", "ENOSYS", "allow"]
    assert [answer(engine, "socket", 38) for engine in ("20.10", "29.4.1", "29.4.2")] == ["allow", "allow", "EPERM"]
    assert [answer(engine, "socket", 40) for engine in ("20.10", "23.0.0")] == ["allow", "EPERM"]
    for bad in ("19.03.15", "20.10.17", "new", "20", "20.x"):
        with pytest.raises(UsageError):
            load(f"docker@{bad}")


def test_capabilities_open_calls_in_the_built_in_profiles() -> None:
    for engine in ("docker", "containerd"):
        assert Reader(load(engine)).answers("pidfd_getfd") == {"EPERM"}
        assert Reader(load(engine, caps=("CAP_SYS_PTRACE",))).answers("pidfd_getfd") == {"allow"}
        admin = Reader(load(engine, caps=("CAP_SYS_ADMIN",)))
        assert {name: min(admin.answers(name)) for name in ("mount", "clone3", "clone")} == {
            "mount": "allow", "clone3": "allow", "clone": "allow",
        }  # fmt: skip
    assert Reader(load("containerd")).answers("lsm_list_modules") == {"allow"}


def test_history_is_of_calls_that_the_table_has() -> None:
    known = {name for row in ROWS for name in row.names}
    assert {name for change in builtin.changes() for name in change.names} <= known
    assert builtin.history("io_uring_setup") == ("before 25.0.0: allowed",)
    assert builtin.history("pkey_alloc") == ("before 23.0.0: refused",)
    assert builtin.history("read") == ()


def test_needs_and_dangers_are_of_calls_that_the_table_has() -> None:
    known = {name for row in ROWS for name in row.names} | {"clone", "socket", "personality"}
    assert {need.name for need in NEEDS} | {danger.name for danger in DANGERS} <= known
    assert all(need.who and need.without for need in NEEDS)
    calls = [need.shown for need in NEEDS]
    assert len(calls) == len(set(calls))


@pytest.mark.parametrize("profile", PROFILES)
def test_our_profiles_meet_every_required_need_and_open_no_danger(profile: ProfileName) -> None:
    compiled = Reader(load(profile))
    assert [need.shown for need in NEEDS if need.required and not need.met(compiled)] == []
    assert [danger.shown for danger in DANGERS if "allow" in compiled.answers(danger.name, danger.args)] == []
