"""Why a descriptor cannot be fetched, cause by cause; and the rows of the bug log that are about choosing.

The hellos are fixtures: this file is about what follows from facts. That the facts are true is tested where they are
collected, against the real kernel.
"""

from __future__ import annotations

import json
import re
from typing import get_args

import pytest

from syncstack.errors import PlanError
from syncstack.facts import AllocatorFact, Cause, Guess, SyscallFact, TargetFact, VisibilityMask
from syncstack.plan import BEST_FIRST, Policy, check_devices, choose, explain
from syncstack.plan.choose import NEEDS
from syncstack.plan.descriptors import ADVICE, PIDFD, YAMA, unmet
from syncstack.refit.report import RefitReport
from tests.unit.hellos import GPU, OTHER_GPU, Pair, apart, best_pair, both, cpu_pair, device, engine, put, trainer

HOST = Policy.of("host_fd")
FORBIDDEN = re.compile(
    r"privileged|unconfined|ipc: ?host|pid: ?host|network: ?host|hostIPC|hostPID|SYS_PTRACE\b.*add", re.I
)
"""What no advice may ever say."""


def pidfd_pair() -> Pair:
    """One PID namespace, TCP, no folder: two containers of a pod."""
    return apart(cpu_pair())


def strangers() -> Pair:
    """The same, each on a network of its own to look at, and neither has dialled the other."""
    return engine(both(pidfd_pair(), "reachable", ()), "facts.namespaces.net", "9")


def refused(name: str, code: str, verdict: str) -> SyscallFact:
    return SyscallFact(name=name, number=1, verdict=verdict, evidence=f"{name}(-1, 0, 0) = {code}")  # type: ignore[arg-type]


def failed(cause: Cause, evidence: str = "pidfd_getfd(child, 5) = EPERM") -> TargetFact:
    return TargetFact(target="child", verdict="denied", cause=cause, evidence=evidence)


def yama(pair: Pair, scope: int | None) -> Pair:
    pair = both(pair, "facts.identity.yama_scope", scope)
    return both(pair, "facts.identity.yama_evidence", f"/proc/sys/kernel/yama/ptrace_scope: {scope}")


def with_ptrace(pair: Pair) -> Pair:
    """The engine holds CAP_SYS_PTRACE."""
    pair = engine(pair, "facts.capabilities.permitted", ("CAP_SYS_PTRACE",))
    return engine(pair, "facts.capabilities.effective", ("CAP_SYS_PTRACE",))


def why(pair: Pair) -> str:
    """The first thing that stands before pidfd_getfd, after checking that the plan follows it."""
    lacks = unmet(PIDFD, *pair)
    assert lacks
    with pytest.raises(PlanError) as caught:
        choose(*pair, HOST)
    assert lacks[0].reason in str(caught.value)
    assert not FORBIDDEN.search(str(caught.value)), str(caught.value)
    # What a folder is worth: the same pair with one needs none of this.
    if "gVisor" not in lacks[0].reason:
        assert choose(*trainer(pair, "reachable", ("unix",)), HOST).fd == "scm"
    return lacks[0].reason


def test_pidfd_is_the_second_way() -> None:
    choice = choose(*pidfd_pair(), HOST)
    assert (choice.transport, choice.fd) == ("host_fd", "pidfd")
    assert choice.line("engine-0") == "engine-0: host_fd by pidfd_getfd"
    assert choose(*trainer(pidfd_pair(), "reachable", ("tcp", "unix")), HOST).fd == "scm"


CAUSES: list[tuple[Cause, Pair, str]] = [
    (
        "seccomp",
        engine(pidfd_pair(), "facts.syscalls.pidfd_getfd", refused("pidfd_getfd", "EPERM", "denied")),
        r"^the engine may not call pidfd_getfd \(pidfd_getfd\(-1, 0, 0\) = EPERM\): .*seccomp/permissive.json$",
    ),
    (
        "seccomp",
        engine(pidfd_pair(), "facts.syscalls.pidfd_open", refused("pidfd_open", "ENOSYS", "absent")),
        r"^the engine has no pidfd_open \(.*ENOSYS\): .*seccomp/permissive.json$",
    ),
    ("seccomp", engine(pidfd_pair(), "facts.child", failed("seccomp")), "own child, because of seccomp"),
    (
        "sandbox",
        engine(pidfd_pair(), "facts.child", failed("sandbox", "pidfd_getfd = ENOSYS; gVisor")),
        r"^the engine runs in a gVisor sandbox, which passes no descriptors in or out \(pidfd_getfd = ENOSYS;",
    ),
    (
        "old-kernel",
        engine(
            engine(pidfd_pair(), "facts.syscalls.pidfd_getfd", refused("pidfd_getfd", "ENOSYS", "absent")),
            "facts.kernel",
            "5.4.0-rc1",
        ),
        "^the engine has no pidfd_getfd .*came with Linux 5.6$",
    ),
    (
        "yama",
        yama(pidfd_pair(), 1),
        r"^Yama keeps the engine out of the trainer \(.*ptrace_scope: 1\): .*PR_SET_PTRACER",
    ),
    (
        "yama",
        yama(engine(pidfd_pair(), "facts.child", failed("yama")), 2),
        r"own child, because of yama .*only CAP_SYS_PTRACE may",
    ),
    (
        "uid",
        engine(pidfd_pair(), "facts.gid", 10002),
        r"^trainer and engine run as different users \(trainer 10001:10001, effective 10001; engine 10001:10002\): ",
    ),
    ("uid", trainer(pidfd_pair(), "facts.identity.euid", 0), "effective 0;"),
    (
        "non-dumpable",
        trainer(pidfd_pair(), "facts.identity.dumpable", False),
        r"^the kernel lets nobody look into the trainer \(PR_GET_DUMPABLE is not 1\): the trainer hides",
    ),
    (
        "capability",
        trainer(pidfd_pair(), "facts.capabilities.permitted", ("CAP_CHOWN", "CAP_A", "CAP_B", "CAP_C")),
        r"^the trainer has capabilities that the engine lacks \(CAP_CHOWN, CAP_A, CAP_B and 1 more\): drop",
    ),
    (
        "user-namespace",
        engine(pidfd_pair(), "facts.namespaces.user", "99"),
        r"^trainer and engine are in different user namespaces \(45 and 99\): ",
    ),
    (
        "pid-namespace",
        engine(pidfd_pair(), "facts.namespaces.pid", "99"),
        r"different PID namespaces \(41 and 99\): .*\"service:trainer\"; Kubernetes: shareProcessNamespace: true\)$",
    ),
    (
        "lsm",
        engine(pidfd_pair(), "facts.identity.lsm_label", "other"),
        r"^trainer and engine have different security labels \(trainer docker-default, engine other\): ",
    ),
    ("target-gone", engine(pidfd_pair(), "facts.child", failed("target-gone")), "because of target-gone .*ask again$"),
    ("bad-descriptor", engine(pidfd_pair(), "facts.child", failed("bad-descriptor")), "the call is allowed"),
    ("unknown", engine(pidfd_pair(), "facts.child", failed("unknown")), "syncstack doctor"),
]


@pytest.mark.parametrize(("cause", "pair", "reason"), CAUSES)
def test_every_cause_has_its_words(cause: Cause, pair: Pair, reason: str) -> None:
    assert re.search(reason, why(pair)), why(pair)


def test_the_causes_above_are_all_there_are() -> None:
    assert {cause for cause, _, _ in CAUSES} | {"none"} == set(get_args(Cause)) == set(ADVICE)


@pytest.mark.parametrize("cause", [cause for cause in get_args(Cause) if cause != "none"])
def test_any_cause_met_with_a_child_of_its_own_ends_the_plan(cause: Cause) -> None:
    pair = engine(pidfd_pair(), "facts.child", failed(cause))
    assert "EPERM" in why(pair)


def test_what_was_not_asked_is_not_assumed() -> None:
    for pair, reason in (
        (engine(pidfd_pair(), "facts.child", None), "was not tried with a child"),
        (engine(pidfd_pair(), "facts.syscalls", {}), "whether the engine may call pidfd_getfd was not asked"),
        (trainer(pidfd_pair(), "facts.identity", None), "who the trainer is"),
        (both(pidfd_pair(), "facts.namespaces.pid", ""), "different PID namespaces (unknown and unknown"),
        (both(strangers(), "facts.network.interfaces", ()), "which descriptor to fetch: no network that both are on"),
    ):
        assert reason in why(pair)


def test_a_network_that_nobody_tried_yet_is_good_enough_to_name_a_descriptor() -> None:
    """So that two hellos that came by mail give the plan that the two processes would come to."""
    assert choose(*strangers(), HOST).fd == choose(*trainer(strangers(), "reachable", ("tcp",)), HOST).fd == "pidfd"


def test_the_capability_helps_where_the_kernel_says_so_and_nowhere_else() -> None:
    for pair in (
        trainer(pidfd_pair(), "facts.identity.dumpable", False),
        engine(pidfd_pair(), "facts.uid", 10002),
        trainer(pidfd_pair(), "facts.capabilities.permitted", ("CAP_CHOWN",)),
        yama(pidfd_pair(), 1),
        yama(pidfd_pair(), 2),
    ):
        why(trainer(pair, "reachable", ("tcp",))) if pair[0].facts.uid == pair[1].facts.uid else None
        assert choose(*with_ptrace(pair), HOST).fd == "pidfd"
    for pair in (yama(pidfd_pair(), 3), engine(pidfd_pair(), "facts.namespaces.user", "99")):
        assert unmet(PIDFD, *with_ptrace(pair))


def test_users_of_two_namespaces_are_one_where_the_maps_are() -> None:
    """A remapped Docker gives each container a user namespace of its own, all with one map."""
    pair = engine(both(cpu_pair(), "reachable", ()), "facts.namespaces.user", "99")
    assert choose(*pair, HOST).fd == "scm"
    pair = engine(pair, "facts.identity.uid_map", "0 200000 65536")
    with pytest.raises(PlanError, match="the user namespaces map it differently"):
        choose(*pair, HOST)


class TestBugLog:
    def test_a01_a_filter_in_the_receiver_costs_nothing_where_a_socket_is_shared(self) -> None:
        denied = engine(best_pair(), "facts.syscalls.pidfd_getfd", refused("pidfd_getfd", "EPERM", "denied"))
        denied = trainer(denied, "memory", "cuda-expandable")
        assert (choose(*denied).transport, choose(*denied).fd) == ("cuda_fd", "scm")
        with pytest.raises(PlanError, match="the engine may not call pidfd_getfd .*EPERM"):
            choose(*apart(denied), Policy.of("cuda_fd"))

    def test_a02_a_ptrace_rule_is_not_called_a_filter_and_wants_no_capability(self) -> None:
        found = why(trainer(pidfd_pair(), "facts.identity.dumpable", False))
        assert "no capability is needed" in found
        assert "seccomp" not in found
        assert "seccomp" not in why(yama(pidfd_pair(), 1))

    def test_a07_the_path_is_stated_with_its_reasons_and_strict_fails_instead(self) -> None:
        pair = engine(apart(best_pair()), "facts.namespaces.pid", "99")
        choice = choose(*pair)
        assert choice.transport == "stream"
        line = choice.line("engine-0")
        for text in ("engine-0: stream (not cuda_fd: no descriptor", "; not cuda_ipc: ", "; not host_fd: "):
            assert text in line
        assert {"transport", "why_not", "gb_per_s"} <= set(RefitReport.__struct_fields__)
        with pytest.raises(PlanError, match="cuda_fd, cannot be used"):
            choose(*pair, Policy(strict=True))

    def test_a11_error_201_is_a_pid_namespace_that_is_not_shared(self) -> None:
        pair = engine(best_pair(), "facts.namespaces.pid", "99")
        (row,) = explain(*pair, Policy.of("cuda_ipc"))
        assert re.search("error 201 .*the PID namespace is not shared", row.unmet[0].reason)
        assert not FORBIDDEN.search(row.unmet[0].reason)

    def test_a13_disjoint_gpus_are_refused_with_both_lists_before_any_handle(self) -> None:
        pair = engine(engine(best_pair(), "device", OTHER_GPU), "facts.gpu.devices", (device(OTHER_GPU),))
        choice = choose(*pair)
        assert choice.transport == "host_fd"
        for name in ("cuda_fd", "cuda_ipc"):
            assert (
                f"the engine does not see the GPU that holds the trainer's weights ({GPU}; the trainer sees {GPU}; "
                f"the engine sees {OTHER_GPU})" in choice.why_not[name]
            )

    def test_a14_a_mask_is_shown_and_the_uuid_decides(self) -> None:
        pair = engine(engine(best_pair(), "device", OTHER_GPU), "facts.gpu.devices", (device(OTHER_GPU, index=0),))
        mask = VisibilityMask(name="CUDA_VISIBLE_DEVICES", text="4,5", kind="list", entries=("4", "5"))
        pair = engine(pair, "facts.gpu.masks", (mask,))
        assert "the engine sees GPU-bbbb, by CUDA_VISIBLE_DEVICES=4,5)" in choose(*pair).why_not["cuda_fd"]

    def test_a16_reversed_masks_change_nothing(self) -> None:
        ours = tuple(device(uuid, index=index) for index, uuid in enumerate((GPU, OTHER_GPU)))
        theirs = tuple(device(uuid, index=index) for index, uuid in enumerate((OTHER_GPU, GPU)))
        pair = engine(trainer(best_pair(), "facts.gpu.devices", ours), "facts.gpu.devices", theirs)
        assert choose(*pair).transport == "cuda_fd"
        # And one index on both sides is no evidence of one device.
        pair = engine(engine(best_pair(), "device", OTHER_GPU), "facts.gpu.devices", (device(OTHER_GPU, index=0),))
        assert choose(*pair).transport == "host_fd"

    def test_a19_expandable_segments_rule_out_the_legacy_handle_only(self) -> None:
        pair = trainer(best_pair(), "memory", "cuda-expandable")
        assert choose(*pair).transport == "cuda_fd"
        assert "expandable segments" in choose(*both(pair, "facts.memory.nofile_soft", 9)).why_not["cuda_ipc"]

    def test_a30_enosys_of_a_sandbox_is_not_a_refusal_and_a_copying_path_is_taken(self) -> None:
        """Fixture: no gVisor here."""
        sandbox = Guess(value="gvisor", evidence="/proc/version names gVisor")
        pair = both(best_pair(), "facts.runtime", sandbox)
        pair = both(pair, "facts.syscalls.pidfd_getfd", refused("pidfd_getfd", "ENOSYS", "absent"))
        choice = choose(*pair)
        assert choice.transport == "host_fd"  # one sandbox: the trainer has reached the engine's socket
        assert "GPU proxy" in choice.why_not["cuda_fd"]
        outside = engine(best_pair(), "facts.runtime", sandbox)
        assert choose(*outside).transport == "stream"
        calls = {lack.need: lack.reason for lack in unmet(PIDFD, *pair)}
        assert "has no pidfd_getfd" in calls["pidfd_open and pidfd_getfd in the engine"]
        denied = engine(pidfd_pair(), "facts.syscalls.pidfd_getfd", refused("pidfd_getfd", "EPERM", "denied"))
        assert "may not call" in why(denied)

    @pytest.mark.parametrize("scope", [None, 0, 1, 2, 3])
    def test_a31_each_yama_scope_has_its_own_advice(self, scope: int | None) -> None:
        """Fixture: no Yama here."""
        pair = yama(pidfd_pair(), scope)
        if not scope:
            assert choose(*pair, HOST).fd == "pidfd"
            return
        assert YAMA[scope] in why(pair)
        assert len(set(YAMA.values())) == 3
        assert "trainer" in YAMA[scope] or "engine" in YAMA[scope]
        # It is one setting of the node: read on one side only, it still holds.
        assert YAMA[scope] in why(engine(pair, "facts.identity.yama_scope", None))
        assert YAMA[scope] in why(trainer(pair, "facts.identity.yama_scope", None))

    def test_a36_no_advice_names_the_hosts_namespaces_and_a_remapped_user_least_of_all(self) -> None:
        remapped = both(pidfd_pair(), "facts.identity.uid_map", "0 100000 65536")
        assert remapped[0].facts.identity is not None
        assert remapped[0].facts.identity.remapped
        assert "service:trainer" in why(engine(remapped, "facts.namespaces.pid", "99"))
        for text in (*ADVICE.values(), *YAMA.values()):
            assert not FORBIDDEN.search(text), text

    def test_a37_without_any_privilege_the_fall_back_is_taken_and_announced(self) -> None:
        pair = cpu_pair()
        for call in ("pidfd_getfd", "pidfd_open"):
            pair = both(pair, f"facts.syscalls.{call}", refused(call, "EPERM", "denied"))
        assert pair[1].facts.capabilities.bounding == ()
        choice = choose(*pair)
        assert (choice.transport, choice.fd) == ("host_fd", "scm")
        assert choice.line("engine-0").startswith("engine-0: host_fd (not cuda_fd: ")

    def test_a38_the_allocators_evidence_is_in_the_reason_whichever_name_it_came_by(self) -> None:
        for evidence in (
            "PYTORCH_ALLOC_CONF=expandable_segments:True",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ):
            pair = trainer(best_pair(), "memory", "cuda-expandable")
            pair = trainer(pair, "facts.gpu.allocator", AllocatorFact(expandable_segments=True, evidence=evidence))
            (row,) = explain(*pair, Policy.of("cuda_ipc"))
            assert f"({evidence})" in row.unmet[0].reason

    def test_a39_fabric_handles_without_a_channel_are_named_and_memory_is_not_blamed(self) -> None:
        pair = both(best_pair(), "facts.gpu.devices", (device(posix_fd=False, fabric=True),))
        reason = choose(*pair).why_not["cuda_fd"]
        assert "IMEX channel" in reason
        assert choose(*pair).transport == "cuda_ipc"

    def test_a40_workers_must_each_hold_a_gpu_of_their_own(self) -> None:
        one, other = best_pair()[1], put(best_pair()[1], "device", OTHER_GPU)
        check_devices({"e0 worker 0": one, "e1 worker 0": other})
        check_devices({"e0 worker 0": cpu_pair()[1], "e1 worker 0": cpu_pair()[1]})
        with pytest.raises(PlanError, match=f"e0 worker 0 and e1 worker 0 hold the same GPU {GPU}") as caught:
            check_devices({"e1 worker 0": one, "e0 worker 0": one})
        assert "visibility masks" in str(caught.value)
        with pytest.raises(PlanError, match="e2 worker 0 hold none, while others do"):
            check_devices({"e0 worker 0": one, "e1 worker 0": other, "e2 worker 0": put(one, "device", "")})

    def test_f11_an_exclusive_gpu_is_said_before_anybody_tries(self) -> None:
        pair = both(best_pair(), "facts.gpu.devices", (device(compute_mode="exclusive-process"),))
        assert "compute mode exclusive-process" in choose(*pair).why_not["cuda_fd"]
        assert "compute mode exclusive-process" in choose(*pair).why_not["cuda_ipc"]


def test_a_mig_instance_is_a_device_of_its_own() -> None:
    """Fixture: no MIG here."""
    parts = (device(mig=("MIG-1", "MIG-2")),)
    pair = both(both(best_pair(), "facts.gpu.devices", parts), "device", "MIG-1")
    assert choose(*pair).transport == "cuda_fd"
    choice = choose(*engine(pair, "device", "MIG-2"))
    assert choice.transport == "host_fd"
    assert "cannot reach the memory of the trainer's GPU MIG-1" in choice.why_not["cuda_fd"]


def test_no_reason_of_the_plan_advises_what_must_not_be() -> None:
    """Every string in the plan's source is advice to somebody."""
    from pathlib import Path

    import syncstack.plan

    for path in sorted(Path(syncstack.plan.__file__).parent.glob("*.py")):
        assert not FORBIDDEN.search(path.read_text()), path
    assert tuple(NEEDS) == BEST_FIRST
    assert json.dumps(list(NEEDS))
