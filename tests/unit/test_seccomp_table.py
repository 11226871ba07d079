"""The table: complete, without contradictions, and what the two profiles are meant to be."""

from __future__ import annotations

import ctypes
from collections import Counter
from pathlib import Path

import pytest

from syncstack.errors import UsageError
from syncstack.seccomp.expected import expected
from syncstack.seccomp.explain import explain
from syncstack.seccomp.table import ARG_NOTES, PROFILES, ROWS, Answer, ProfileName, arg_rules

NATIVE_TOKENS = (0xC000003E, 0xC00000B7)


def answers(profile: ProfileName) -> dict[str, Answer]:
    return {name: row.answer(profile) for row in ROWS for name in row.names}


def known_to_libseccomp() -> set[str]:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_void_p
    library.seccomp_syscall_resolve_num_arch.argtypes = [ctypes.c_uint32, ctypes.c_int]
    names = set()
    # 456 is the highest that 2.5.4 knows; a newer library may know more, which is not this table's promise.
    for token in NATIVE_TOKENS:
        for number in range(457):
            pointer = library.seccomp_syscall_resolve_num_arch(token, number)
            if pointer:
                names.add(ctypes.string_at(pointer).decode())
    return names


def test_every_system_call_has_exactly_one_row() -> None:
    counts = Counter([*(name for row in ROWS for name in row.names), *ARG_NOTES])
    assert [name for name, count in counts.items() if count > 1] == []
    # Docker 20.10 answers EPERM instead of our default: a name without a row would answer differently there.
    assert known_to_libseccomp() - set(counts) == set()


def test_every_row_has_a_reason() -> None:
    assert all(row.why and row.names for row in ROWS)
    assert set(ARG_NOTES) == {rule.name for rule in arg_rules()}


def test_the_profiles_differ_in_the_named_rows_only() -> None:
    permissive, restrictive = answers("permissive"), answers("restrictive")
    assert {name for name in permissive if permissive[name] is not restrictive[name]} == {
        "pidfd_getfd", "kcmp", "get_mempolicy", "set_mempolicy", "set_mempolicy_home_node", "mbind",
        "pidfd_open", "pidfd_send_signal", "process_mrelease", "ptrace", "process_vm_readv", "process_vm_writev",
    }  # fmt: skip
    forbidden = {name for name, answer in permissive.items() if answer is not Answer.ALLOW}
    assert all(restrictive[name] is not Answer.ALLOW for name in forbidden)


@pytest.mark.parametrize("profile", PROFILES)
def test_what_leads_out_of_a_container_is_forbidden(profile: ProfileName) -> None:
    dangerous = (
        "unshare setns mount umount2 pivot_root chroot move_mount open_tree fsopen bpf perf_event_open init_module "
        "finit_module kexec_load userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key "
        "request_key open_by_handle_at process_madvise move_pages migrate_pages swapon reboot syslog clock_settime"
    )
    assert {answers(profile)[name] for name in dangerous.split()} == {Answer.EPERM}
    assert answers(profile)["clone3"] is Answer.ENOSYS


@pytest.mark.parametrize("profile", PROFILES)
def test_what_the_stack_needs_is_allowed(profile: ProfileName) -> None:
    needed = (
        "memfd_create sendmsg recvmsg mmap mremap execve futex sched_getaffinity sched_setaffinity shmget shmat "
        "prctl getrandom fallocate prlimit64 epoll_wait epoll_pwait capset setgroups setuid setgid fchown seccomp"
    )
    assert {answers(profile)[name] for name in needed.split()} == {Answer.ALLOW}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_expected_answers_are_those_of_the_table(profile: ProfileName) -> None:
    words = {Answer.ALLOW: "ok", Answer.EPERM: "denied", Answer.ENOSYS: "absent"}
    table = answers(profile)
    assert dict(expected(profile)) == {name: words[table[name]] for name in expected(profile)}


def test_dockers_own_profile_depends_on_the_release() -> None:
    old = expected("docker-default", engine="20.10.24+dfsg1")
    assert (old["process_vm_readv"], old["io_uring_setup"], old["pidfd_getfd"]) == ("denied", "ok", "denied")
    assert expected("docker-default", engine="24.0.7")["process_vm_readv"] == "ok"
    assert expected("docker-default", engine="28.2.2")["io_uring_setup"] == "denied"
    for engine in ("", "19.03.1", "new"):
        with pytest.raises(UsageError):
            expected("docker-default", engine=engine)
    with pytest.raises(UsageError, match="nonsense"):
        expected("nonsense")


def test_explain_gives_answers_reason_and_need() -> None:
    found = explain("pidfd_getfd")
    assert found.answers == {
        "permissive": "allowed",
        "restrictive": "EPERM (forbidden)",
        "docker": "EPERM (forbidden); allowed with CAP_SYS_PTRACE",
        "containerd": "EPERM (forbidden); allowed with CAP_SYS_PTRACE",
    }
    assert "SCM_RIGHTS" in found.why
    assert any("expandable_segments" in who for who in found.needed_by)
    assert "AF_ALG" in explain("socket").why
    assert explain("socket").answers["restrictive"] == "by argument: EPERM (forbidden) or allowed"
    assert explain("mount").dangers
    with pytest.raises(UsageError, match="pidfd_getfd"):
        explain("pidfd_getfds")


def test_explain_decides_conditions_and_tells_what_older_engines_do(tmp_path: Path) -> None:
    assert explain("pidfd_getfd", caps=("CAP_SYS_PTRACE",)).answers["docker"] == "allowed"
    assert explain("ptrace", kernel="4.4").answers["containerd"].startswith("EPERM")
    found = explain("process_vm_readv", profiles=("docker@20.10.24", "restrictive"))
    assert (found.answers["docker"], found.answers["docker@20.10.24"]) == ("allowed", "EPERM (forbidden)")
    assert found.history == ("before 23.0.0: allowed with CAP_SYS_PTRACE",)
