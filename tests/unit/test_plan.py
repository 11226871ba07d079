"""The plan: every row of the table of transports, with every need that can be lacking."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from syncstack.errors import PlanError, SettingsError
from syncstack.facts import AllocatorFact, Guess, SyscallFact, collect, say_hello
from syncstack.facts.model import GpuFacts
from syncstack.plan import BEST_FIRST, Policy, Refused, choose, choose_common, explain
from syncstack.plan.choose import NEEDS
from tests.unit.hellos import (
    GPU,
    OTHER_GPU,
    Pair,
    apart,
    best_pair,
    both,
    cpu_pair,
    device,
    engine,
    round_trip,
    trainer,
)

Edit = Callable[[Pair], Pair]


def two_gpus(pair: Pair, *, peers: bool) -> Pair:
    """Each side's weights on a GPU of its own; both see both."""
    reach = {GPU: (OTHER_GPU,), OTHER_GPU: (GPU,)} if peers else {GPU: (), OTHER_GPU: ()}
    devices = tuple(device(uuid, index=index, peers=reach[uuid]) for index, uuid in enumerate((GPU, OTHER_GPU)))
    return engine(both(pair, "facts.gpu.devices", devices), "device", OTHER_GPU)


def other_host(pair: Pair) -> Pair:
    return engine(trainer(pair, "reachable", ("tcp",)), "facts.boot_id", "bbbbbbbb-0000")


def in_gvisor(pair: Pair) -> Pair:
    return engine(pair, "facts.runtime", Guess(value="gvisor", evidence="/proc/version names gVisor"))


def without_network(pair: Pair) -> Pair:
    return both(engine(trainer(pair, "reachable", ()), "facts.namespaces.net", "99"), "facts.network.interfaces", ())


CASES: list[tuple[str, str, Edit, str]] = [
    # transport, need, what is taken away, the reason in the user's words
    ("cuda_fd", "a GPU on both sides", lambda _: cpu_pair(), r"^no GPU in the trainer and the engine \(no /dev/nvidia"),
    (
        "cuda_fd",
        "a GPU on both sides",
        lambda pair: engine(
            pair, "facts.gpu", GpuFacts(count=2, evidence="/dev: nvidia0", problem="libcuda.so.1: not found")
        ),
        r"^the engine has /dev: nvidia0, but its driver named no device \(libcuda.so.1: not found\)$",
    ),
    (
        "cuda_fd",
        "weights in GPU memory",
        lambda pair: trainer(pair, "memory", "host"),
        "^the trainer named no GPU memory that holds the weights$",
    ),
    (
        "cuda_fd",
        "weights in GPU memory",
        lambda pair: engine(pair, "device", ""),
        "^the engine named no GPU memory that holds the weights$",
    ),
    (
        "cuda_fd",
        "one host",
        other_host,
        r"run on different hosts \(boot ids differ: trainer aaaaaaaa, engine bbbbbbbb\)$",
    ),
    (
        "cuda_fd",
        "one host",
        lambda pair: engine(trainer(pair, "reachable", ()), "facts.boot_id", ""),
        "may run on different hosts: the engine cannot read its boot id$",
    ),
    (
        "cuda_fd",
        "GPUs that reach each other",
        lambda pair: two_gpus(pair, peers=False),
        f"GPU {OTHER_GPU} cannot reach the memory of the trainer's GPU {GPU} \\(its peers: none\\)$",
    ),
    (
        "cuda_fd",
        "memory that can be handed over",
        lambda pair: both(pair, "facts.gpu.devices", (device(vmm=False),)),
        r"^the trainer's GPU has no virtual memory management \(NVIDIA H200 GPU-aaaa, driver 580.1\); the engine's",
    ),
    (
        "cuda_fd",
        "memory that can be handed over",
        lambda pair: engine(pair, "facts.gpu.devices", (device(posix_fd=False),)),
        "^the engine's GPU cannot hand memory over as descriptors",
    ),
    ("cuda_fd", "no sandbox", in_gvisor, r"^the engine runs in a gVisor sandbox, whose GPU proxy .*names gVisor\)$"),
    (
        "cuda_fd",
        "one view of the GPUs",
        lambda pair: engine(pair, "facts.gpu.devices", (device(OTHER_GPU),)),
        "^the engine does not see the GPU that holds its own weights",
    ),
    (
        "cuda_fd",
        "a GPU for more than one process",
        lambda pair: engine(pair, "facts.gpu.devices", (device(compute_mode="exclusive-process"),)),
        r"one process at a time, as the engine sees it \(compute mode exclusive-process\): .*nvidia-smi -c 0",
    ),
    (
        "cuda_fd",
        "a way for descriptors",
        lambda pair: engine(apart(pair), "facts.namespaces.pid", "99"),
        "^no descriptor can be handed over. By a unix socket: they share no folder.* By pidfd_getfd: .*41 and 99",
    ),
    (
        "cuda_fd",
        "enough descriptors",
        lambda pair: engine(pair, "facts.memory.nofile_soft", 512),
        r"^the engine may open 512 descriptors, 1024 are needed \(compose: ulimits: \{nofile: 16384\}\)$",
    ),
    ("cuda_ipc", "a GPU on both sides", lambda _: cpu_pair(), "^no GPU in the trainer and the engine"),
    ("cuda_ipc", "weights in GPU memory", lambda pair: trainer(pair, "memory", "host"), "^the trainer named no GPU"),
    ("cuda_ipc", "one host", other_host, "different hosts"),
    ("cuda_ipc", "GPUs that reach each other", lambda pair: two_gpus(pair, peers=False), "cannot reach the memory"),
    ("cuda_ipc", "no sandbox", in_gvisor, "gVisor sandbox"),
    (
        "cuda_ipc",
        "one view of the GPUs",
        lambda pair: trainer(pair, "facts.gpu.devices", (device(OTHER_GPU),)),
        "^the trainer does not see the GPU that holds its own weights",
    ),
    (
        "cuda_ipc",
        "a GPU for more than one process",
        lambda pair: both(pair, "facts.gpu.devices", (device(compute_mode="prohibited"),)),
        "as the trainer sees it",
    ),
    (
        "cuda_ipc",
        "plain GPU memory",
        lambda pair: trainer(
            trainer(pair, "memory", "cuda-expandable"),
            "facts.gpu.allocator",
            AllocatorFact(expandable_segments=True, evidence="PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ),
        r"expandable segments \(PYTORCH_ALLOC_CONF=expandable_segments:True\), which a legacy handle does not take",
    ),
    (
        "cuda_ipc",
        "one PID namespace",
        lambda pair: engine(pair, "facts.namespaces.pid", "99"),
        r"error 201 \(invalid device context\), because the PID namespace is not shared \(trainer 41, engine 99\)",
    ),
    ("host_fd", "one host", other_host, "different hosts"),
    (
        "host_fd",
        "a way for descriptors",
        lambda pair: engine(apart(pair), "facts.child.verdict", "denied"),
        "By pidfd_getfd: the engine cannot even fetch a descriptor of its own child",
    ),
    ("host_fd", "a way for descriptors", in_gvisor, "^the engine runs in a gVisor sandbox, which passes no desc"),
    (
        "host_fd",
        "a memfd",
        lambda pair: trainer(
            pair,
            "facts.syscalls.memfd_create",
            SyscallFact(name="memfd_create", number=319, verdict="denied", evidence="memfd_create(NULL, 0) = EPERM"),
        ),
        r"^the trainer cannot make a memfd \(memfd_create\(NULL, 0\) = EPERM\)$",
    ),
    (
        "host_fd",
        "a memfd",
        lambda pair: trainer(pair, "facts.memory.memfd_reserve.verdict", "absent"),
        r"^the trainer cannot reserve memory in a memfd \(fallocate",
    ),
    (
        "collective",
        "a network",
        without_network,
        "^no network that both are on: usable address families of the trainer: none; of the engine: none$",
    ),
    (
        "collective",
        "a link over TCP",
        lambda pair: trainer(pair, "reachable", ("unix",)),
        "^the trainer reaches the engine by a unix socket, over which stream",
    ),
    ("stream", "a network", without_network, "^no network"),
    ("disk", "a shared folder", apart, r"^they share no folder: the trainer's /run/syncstack is inode 5:9, .* 5:10"),
    ("disk", "a shared folder", other_host, "different hosts"),
]  # fmt: skip
CASES += [
    (name, "this build", lambda pair, n=name: engine(pair, "transports", tuple(x for x in BEST_FIRST if x != n)),
     r"^not in this build of the engine \(0.1.0\)$")
    for name in BEST_FIRST
]  # fmt: skip


@pytest.mark.parametrize(("transport", "need", "edit", "reason"), CASES)
def test_every_need_of_every_transport(transport: str, need: str, edit: Edit, reason: str) -> None:
    (before,) = explain(*best_pair(), Policy.of(transport))
    assert before.unmet == ()
    pair = edit(best_pair())
    (row,) = explain(*pair, Policy.of(transport))
    assert row.unmet[0].need == need, row.unmet
    assert re.search(reason, row.unmet[0].reason), row.unmet[0].reason
    with pytest.raises(PlanError, match=f"no transport can serve this link: {transport}: "):
        choose(*pair, Policy.of(transport))


def test_the_cases_above_leave_no_need_out() -> None:
    assert {(transport, need) for transport, need, _, _ in CASES} == {
        (transport, need.name) for transport, needs in NEEDS.items() for need in needs
    }
    assert tuple(NEEDS) == BEST_FIRST


def test_each_row_of_the_table_is_chosen_where_it_is_the_best() -> None:
    """Design section 6, from the top: one thing after another is taken away."""
    found = []
    pair = best_pair()
    for take in (
        lambda pair: pair,
        lambda pair: both(pair, "facts.memory.nofile_soft", 256),
        lambda pair: trainer(pair, "memory", "cuda-expandable"),
        other_host,
        lambda pair: both(pair, "transports", ("cuda_fd", "cuda_ipc", "host_fd", "stream", "disk")),
        lambda pair: both(trainer(pair, "reachable", ("unix",)), "transports", ("disk",)),
    ):
        pair = take(pair)
        choice = choose_common({"engine-0": pair, "engine-1": pair})["engine-0"]
        found.append(choice.transport)
        assert tuple(choice.why_not) == BEST_FIRST[: BEST_FIRST.index(choice.transport)]
        assert choose_common({"engine-0": round_trip(pair), "engine-1": pair})["engine-0"] == choice
    assert tuple(found) == BEST_FIRST


def test_a_worker_alone_needs_no_group() -> None:
    pair = other_host(best_pair())
    choice = choose(*pair)
    assert choice.transport == "stream"
    assert choice.why_not["collective"].startswith("it is for several workers")
    assert choose(*pair, Policy(strict=True)) == choice
    assert choose(*pair, Policy.of("collective")).transport == "collective"


def test_two_gpus_that_reach_each_other_take_descriptors_at_another_rate() -> None:
    choice = choose(*two_gpus(best_pair(), peers=True))
    assert (choice.transport, choice.fd, choice.expected_bytes_per_s) == ("cuda_fd", "scm", 3.7e11)
    assert "NVLink" in choice.basis
    one = choose(*best_pair())
    assert one.expected_bytes_per_s == 2.1e12
    unknown = both(best_pair(), "facts.gpu.devices", (device(name="NVIDIA L4"),))
    assert choose(*unknown).expected_bytes_per_s is None
    assert "a trial" in choose(*unknown).basis
    assert choose(*cpu_pair()).expected_bytes_per_s is None
    by_host = choose(*best_pair(), Policy.of("host_fd"))
    assert by_host.expected_bytes_per_s == 4e10
    assert choose(*best_pair(), Policy.of("stream")).expected_bytes_per_s is None


def test_this_process_and_its_like_get_host_fd_and_are_told_why_not_better() -> None:
    """Real facts of this machine, less its GPU if it has one."""
    own = msgspec.structs.replace(collect(), gpu=GpuFacts(count=0, evidence="no /dev/nvidia*"))
    sender = say_hello("trainer", transports=("host_fd",), reachable=("unix",), facts=own)
    receiver = say_hello("engine", transports=("host_fd",), facts=own)
    choice = choose(sender, receiver)
    assert (choice.transport, choice.fd) == ("host_fd", "scm")
    assert list(choice.why_not) == ["cuda_fd", "cuda_ipc"]
    assert choice.line("engine-0").startswith(
        "engine-0: host_fd (not cuda_fd: no GPU in the trainer and the engine (no"
    )


def test_an_unspoken_transport_is_named_with_both_builds() -> None:
    pair = engine(both(best_pair(), "transports", ("host_fd",)), "package", "0.0.9")
    choice = choose(*pair)
    assert choice.transport == "host_fd"
    expected = "not in these builds: trainer 0.1.0, engine 0.0.9"
    assert choice.why_not == {"cuda_fd": expected, "cuda_ipc": expected}


def test_a_policy_is_followed_and_a_typo_is_an_error() -> None:
    assert choose(*best_pair(), Policy.of("host_fd")).why_not == {}
    choice = choose(*cpu_pair(), Policy.of(" cuda_fd, stream,host_fd,stream"))
    assert (choice.transport, list(choice.why_not)) == ("stream", ["cuda_fd"])
    with pytest.raises(PlanError, match="cuda_fd"):
        choose(*cpu_pair(), Policy.of("cuda_fd"))
    for bad in ("hostfd", "", ",", "auto,host_fd"):
        with pytest.raises(SettingsError, match="no known transport"):
            Policy.of(bad)


def test_without_a_path_every_transport_says_why() -> None:
    pair = both(best_pair(), "transports", ())
    with pytest.raises(PlanError, match="no transport can serve this link") as caught:
        choose(*pair)
    assert all(f"{name}: not in this build" in str(caught.value) for name in BEST_FIRST)
    assert caught.value.exit_code == 1


def test_what_a_trial_refused_is_the_next_choices_reason() -> None:
    refused = Policy(excluded=(Refused(transport="cuda_fd", cause="engine-0 worker 1: error 304"),))
    choice = choose(*best_pair(), refused)
    assert choice.transport == "cuda_ipc"
    assert choice.why_not == {"cuda_fd": "a trial refused it: engine-0 worker 1: error 304"}
    with pytest.raises(PlanError, match="cuda_fd, cannot be used: a trial refused it"):
        choose(*best_pair(), msgspec.structs.replace(refused, strict=True))


class TestStrict:
    def test_a_pair_without_gpus_is_not_refused_for_lacking_them(self) -> None:
        assert choose(*cpu_pair(), Policy(strict=True)).transport == "host_fd"

    def test_what_a_setting_could_mend_is_a_refusal_that_names_it(self) -> None:
        pair = engine(best_pair(), "facts.memory.nofile_soft", 512)
        assert choose(*pair).transport == "cuda_ipc"
        with pytest.raises(PlanError, match="admits, cuda_fd, cannot be used: the engine may open 512") as caught:
            choose(*pair, Policy(strict=True))
        assert "Strict mode forbids the next one, cuda_ipc" in str(caught.value)
        assert "SYNCSTACK_TRANSPORT=cuda_ipc" in str(caught.value)

    def test_so_is_a_build_that_does_not_speak_it(self) -> None:
        pair = both(best_pair(), "transports", ("host_fd",))
        with pytest.raises(PlanError, match="cuda_fd, cannot be used: not in this build"):
            choose(*pair, Policy(strict=True))
        assert choose(*pair, Policy.of("host_fd", strict=True)).transport == "host_fd"

    def test_other_hosts_must_get_their_best_too(self) -> None:
        pair = other_host(best_pair())
        found = choose_common({"a": pair, "b": pair}, Policy(strict=True))
        assert {choice.transport for choice in found.values()} == {"collective"}
        lame = both(pair, "transports", ("stream",))
        with pytest.raises(PlanError, match="collective, cannot be used: b: not in this build"):
            choose_common({"a": pair, "b": lame}, Policy(strict=True))


class TestCommon:
    """All links of a refit take one transport."""

    def test_the_worst_link_decides_for_all_and_each_is_told(self) -> None:
        pair = best_pair()
        links = {"e1 worker 0": pair, "e0 worker 0": engine(pair, "facts.memory.nofile_soft", 512)}
        choices = choose_common(links)
        assert list(choices) == list(links)
        assert {choice.transport for choice in choices.values()} == {"cuda_ipc"}
        own = "the engine may open 512 descriptors"
        assert choices["e0 worker 0"].why_not["cuda_fd"].startswith(own)
        assert choices["e1 worker 0"].why_not["cuda_fd"].startswith(f"e0 worker 0 cannot take it: {own}")

    def test_a_transport_that_suits_each_alone_need_not_suit_all(self) -> None:
        """One link has no network, the other no common host: neither's own choice will do for both."""
        near = without_network(cpu_pair())
        far = other_host(cpu_pair())
        assert choose(*near).transport == "host_fd"
        assert choose(*far).transport == "stream"
        with pytest.raises(PlanError) as caught:
            choose_common({"near": near, "far": far})
        for text in ("host_fd: far: trainer and engine run on", "collective: near: no network", "disk: far: "):
            assert text in str(caught.value)

    def test_the_order_of_the_links_makes_no_difference(self) -> None:
        links = {"b": best_pair(), "a": engine(best_pair(), "memory", "host"), "c": cpu_pair()}
        backwards = dict(reversed(links.items()))
        assert choose_common(links) == choose_common(backwards)

    def test_descriptors_may_travel_differently_on_each_link(self) -> None:
        choices = choose_common({"a": best_pair(), "b": apart(best_pair())})
        assert [choices[name].fd for name in "ab"] == ["scm", "pidfd"]
        assert choices["b"].line("b") == "b: cuda_fd by pidfd_getfd"

    def test_strict_counts_what_all_links_admit(self) -> None:
        mixed = {"gpu": best_pair(), "cpu": cpu_pair()}
        assert {choice.transport for choice in choose_common(mixed, Policy(strict=True)).values()} == {"host_fd"}
        short = {"a": best_pair(), "b": engine(best_pair(), "facts.memory.nofile_soft", 512)}
        with pytest.raises(PlanError, match="cannot be used: b: the engine may open 512"):
            choose_common(short, Policy(strict=True))
