"""The plan: which transport, and why not a better one."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from syncstack.errors import PlanError, SettingsError
from syncstack.facts import Facts, SyscallFact, collect
from syncstack.facts.model import GpuFacts
from syncstack.plan import BEST_FIRST, choose


@cache
def here() -> Facts:
    """The facts of this very process, without a GPU so that the test means the same everywhere."""
    return msgspec.structs.replace(collect(), gpu=GpuFacts(count=0, evidence="no /dev/nvidia*"))


def without_memfd(facts: Facts) -> Facts:
    denied = SyscallFact(name="memfd_create", number=319, verdict="denied", evidence="memfd_create() = EPERM")
    return msgspec.structs.replace(facts, syscalls={**facts.syscalls, "memfd_create": denied})


def test_two_containers_of_one_host_get_host_fd_and_are_told_why_not_better() -> None:
    choice = choose(here(), here())
    assert choice.transport == "host_fd"
    assert list(choice.why_not) == ["cuda_fd", "cuda_ipc"]
    assert "no GPU in the trainer and the engine" in choice.why_not["cuda_fd"]
    assert choice.line("engine-0").startswith("engine-0: host_fd (not cuda_fd: no GPU")


def test_a_gpu_on_one_side_only_is_named() -> None:
    gpu = msgspec.structs.replace(here(), gpu=GpuFacts(count=1, evidence="/dev/nvidia0"))
    assert "no GPU in the engine" in choose(gpu, here()).why_not["cuda_fd"]
    assert "no GPU in the trainer" in choose(here(), gpu).why_not["cuda_fd"]


@pytest.mark.parametrize(
    ("sender", "receiver", "reachable", "match"),
    [
        (here(), msgspec.structs.replace(here(), boot_id="another"), True, "host_fd: trainer and engine run on diff"),
        (here(), here(), False, "host_fd: the trainer cannot connect"),
        (without_memfd(here()), here(), True, r"host_fd: the trainer cannot make a memfd \(memfd_create\(\) = EPERM\)"),
    ],
)
def test_without_a_path_every_transport_says_why(sender: Facts, receiver: Facts, reachable: bool, match: str) -> None:
    with pytest.raises(PlanError, match=match) as caught:
        choose(sender, receiver, socket_reachable=reachable)
    assert all(name in str(caught.value) for name in BEST_FIRST)


def test_denied_pidfd_getfd_does_not_matter() -> None:
    denied = SyscallFact(name="pidfd_getfd", number=438, verdict="denied", evidence="pidfd_getfd(-1, 0, 0) = EPERM")
    facts = msgspec.structs.replace(here(), syscalls={**here().syscalls, "pidfd_getfd": denied})
    assert choose(facts, facts).transport == "host_fd"


def test_a_policy_is_followed_and_a_typo_is_an_error() -> None:
    assert choose(here(), here(), policy="host_fd").why_not == {}
    with pytest.raises(PlanError, match="cuda_fd"):
        choose(here(), here(), policy="cuda_fd")
    for bad in ("hostfd", "", ","):
        with pytest.raises(SettingsError, match="no known transport"):
            choose(here(), here(), policy=bad)
