"""The plan over any two processes: one answer, no unmet need, no worse for a capability more, strict is strict."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from syncstack.errors import PlanError
from syncstack.facts import Guess, Hello
from syncstack.plan import BEST_FIRST, Choice, Policy, choose, choose_common
from tests.unit.hellos import GPU, OTHER_GPU, Pair, best_pair, both, cpu_pair, device, engine, put, round_trip, trainer

Edit = Callable[[Pair], Pair]

# What takes something away, or changes it, on one side or on both. Any subset in any order is a pair that may exist.
VALUES: dict[str, list[object]] = {
    "reachable": [(), ("unix",), ("tcp",)],
    "transports": [(), ("host_fd",), ("cuda_ipc", "collective"), ("stream", "disk")],
    "device": ["", GPU, OTHER_GPU, "MIG-1"],
    "memory": ["host", "cuda-plain", "cuda-expandable"],
    "facts.boot_id": ["", "bbbb"],
    "facts.uid": [0, 10002],
    "facts.gid": [0, 10002],
    "facts.kernel": ["5.4.1", "weird"],
    "facts.namespaces.pid": ["", "99"],
    "facts.namespaces.user": ["", "99"],
    "facts.namespaces.net": ["", "99"],
    "facts.runtime": [Guess(value="gvisor", evidence="x"), Guess(value="none", evidence="x")],
    "facts.capabilities.permitted": [("CAP_CHOWN",), ("CAP_SYS_PTRACE",)],
    "facts.capabilities.effective": [("CAP_SYS_PTRACE",)],
    "facts.memory.nofile_soft": [None, 256, 1024],
    "facts.memory.memfd_reserve": [None],
    "facts.memory.memfd_reserve.verdict": ["denied"],
    "facts.gpu": [cpu_pair()[0].facts.gpu],
    "facts.gpu.devices": [
        (),
        (device(OTHER_GPU),),
        (device(GPU, peers=(OTHER_GPU,)), device(OTHER_GPU, peers=(GPU,))),
        (device(GPU), device(OTHER_GPU)),
        (device(vmm=False),),
        (device(posix_fd=False, fabric=True),),
        (device(compute_mode="exclusive-process"),),
        (device(mig=("MIG-1",)),),
    ],
    "facts.syscalls": [{}],
    "facts.syscalls.pidfd_getfd.verdict": ["denied", "absent"],
    "facts.syscalls.pidfd_open.verdict": ["denied", "absent"],
    "facts.syscalls.memfd_create.verdict": ["denied", "absent"],
    "facts.socket_dir": [None],
    "facts.socket_dir.inode": [0, 10],
    "facts.socket_dir.writable": [False],
    "facts.identity": [None],
    "facts.identity.euid": [0],
    "facts.identity.dumpable": [False],
    "facts.identity.yama_scope": [0, 1, 2, 3],
    "facts.identity.lsm_label": ["", "other"],
    "facts.identity.uid_map": ["", "0 100000 65536"],
    "facts.child": [None],
    "facts.child.verdict": ["denied", "absent"],
    "facts.child.cause": ["sandbox", "yama"],
    "facts.network.interfaces": [()],
}


def tried(change: Edit, pair: Pair) -> Pair:
    """The change, unless an earlier one took away what it would change."""
    try:
        return change(pair)
    except (AttributeError, KeyError):
        return pair


def change(path: str, value: object, side: str) -> Edit:
    function = {"trainer": trainer, "engine": engine, "both": both}[side]
    return lambda pair: function(pair, path, value)


CHANGES = st.sampled_from([(path, value) for path, values in VALUES.items() for value in values])
SIDES = st.sampled_from(["trainer", "engine", "both"])


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    pair = draw(st.sampled_from([best_pair(), cpu_pair()]))
    for (path, value), side in draw(st.lists(st.tuples(CHANGES, SIDES), max_size=6)):
        pair = tried(change(path, value, side), pair)
    return pair


POLICIES = st.one_of(
    st.just(BEST_FIRST), st.lists(st.sampled_from(BEST_FIRST), min_size=1, unique=True).map(tuple)
).map(lambda names: Policy(transports=names))


def attempt(pair: Pair, policy: Policy | None = None) -> Choice | str:
    try:
        return choose(*pair, policy)
    except PlanError as error:
        return str(error)


@given(pairs(), POLICIES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_same_answer_on_both_sides(pair: Pair, policy: Policy, strict: bool) -> None:
    """Each side has its own hello as an object and the other's as it came over the wire."""
    policy = msgspec.structs.replace(policy, strict=strict)
    sender, receiver = pair
    far_sender, far_receiver = round_trip(pair)
    here = attempt((sender, far_receiver), policy)
    assert here == attempt((far_sender, receiver), policy) == attempt(pair, policy)
    if isinstance(here, Choice):
        assert msgspec.json.decode(msgspec.json.encode(here), type=Choice) == here


# --- an oracle of its own: the needs once more, as one would say them, and none of the plan's functions -------------


def unix(s: Hello, r: Hello) -> bool:
    return "unix" in s.reachable + r.reachable


def one_host(s: Hello, r: Hello) -> bool:
    return unix(s, r) or (s.facts.boot_id == r.facts.boot_id != "")


def shares(s: Hello, r: Hello, kind: str) -> bool:
    return s.facts.namespaces[kind] == r.facts.namespaces[kind] != ""


def folder(s: Hello, r: Hello) -> bool:
    if unix(s, r):
        return True
    ours, theirs = s.facts.socket_dir, r.facts.socket_dir
    if not (ours and theirs and ours.writable and theirs.writable and one_host(s, r) and s.facts.uid == r.facts.uid):
        return False
    maps = [hello.facts.identity.uid_map if hello.facts.identity else "" for hello in (s, r)]
    one_user = shares(s, r, "user") or maps[0] == maps[1] != ""
    return one_user and (ours.device, ours.inode) == (theirs.device, theirs.inode) and ours.inode != 0


def gvisor(hello: Hello) -> bool:
    child = hello.facts.child
    return hello.facts.runtime.value == "gvisor" or (child is not None and child.cause == "sandbox")


def scm(s: Hello, r: Hello) -> bool:
    crossing = gvisor(s) or gvisor(r)
    return folder(s, r) and (not crossing or (gvisor(s) and gvisor(r) and unix(s, r)))


def may_look_into(s: Hello, r: Hello) -> bool:
    """The kernel's ptrace_may_access with real credentials, and Yama's rule."""
    me, it = r.facts, s.facts
    if me.identity is None or it.identity is None or not shares(s, r, "user"):
        return False
    scope = max(me.identity.yama_scope or 0, it.identity.yama_scope or 0)
    if it.identity.lsm_label != me.identity.lsm_label or scope == 3:
        return False
    if "CAP_SYS_PTRACE" in me.capabilities.effective:
        return True
    ids = (it.uid, it.identity.euid, it.gid) == (me.uid, me.uid, me.gid)
    return (
        ids and it.identity.dumpable and set(it.capabilities.permitted) <= set(me.capabilities.permitted) and not scope
    )


def pidfd(s: Hello, r: Hello) -> bool:
    calls = [r.facts.syscalls.get(name) for name in ("pidfd_open", "pidfd_getfd")]
    crossing = (gvisor(s) or gvisor(r)) and not (gvisor(s) and gvisor(r) and unix(s, r))
    talk = unix(s, r) or network(s, r)
    return (
        one_host(s, r)
        and not crossing
        and shares(s, r, "pid")
        and all(call is not None and call.verdict == "ok" for call in calls)
        and r.facts.child is not None
        and r.facts.child.verdict == "ok"
        and talk
        and may_look_into(s, r)
    )


def gpu(s: Hello, r: Hello) -> bool:
    seen = [{u for d in hello.facts.gpu.devices for u in (d.uuid, *d.mig)} for hello in (s, r)]
    if not (s.device in seen[0] and {s.device, r.device} <= seen[1]):
        return False
    if s.memory == "host" or r.memory == "host" or not one_host(s, r) or gvisor(s) or gvisor(r):
        return False
    used = [d for hello in (s, r) for d in hello.facts.gpu.devices if {d.uuid, *d.mig} & {s.device, r.device}]
    reach = any(d.uuid == r.device and s.device in d.peers for d in r.facts.gpu.devices)
    return all(d.compute_mode == "default" for d in used) and (s.device == r.device or reach)


def own(hello: Hello) -> bool:
    return all(d.vmm and d.posix_fd for d in hello.facts.gpu.devices if hello.device in (d.uuid, *d.mig))


def network(s: Hello, r: Hello) -> bool:
    """Every interface here is up, and the one that is not loopback has IPv4."""
    tcp = "tcp" in s.reachable + r.reachable
    return tcp or (one_host(s, r) and shares(s, r, "net")) or bool(
        s.facts.network.interfaces and r.facts.network.interfaces
    )  # fmt: skip


def memfd(s: Hello) -> bool:
    made, reserve = s.facts.syscalls.get("memfd_create"), s.facts.memory.memfd_reserve
    return made is not None and made.verdict == "ok" and (reserve is None or reserve.verdict == "ok")


def enough(hello: Hello) -> bool:
    return (hello.facts.memory.nofile_soft or 1 << 20) >= 1024


ORACLE: dict[str, Callable[[Hello, Hello], bool]] = {
    "cuda_fd": lambda s, r: gpu(s, r) and own(s) and own(r) and (scm(s, r) or pidfd(s, r)) and enough(s) and enough(r),
    "cuda_ipc": lambda s, r: gpu(s, r) and s.memory == "cuda-plain" and shares(s, r, "pid"),
    "host_fd": lambda s, r: one_host(s, r) and memfd(s) and (scm(s, r) or pidfd(s, r)),
    "collective": lambda s, r: network(s, r) and ("tcp" in (*s.reachable, *r.reachable) or not unix(s, r)),
    "stream": network,
    "disk": folder,
}


def usable(name: str, pair: Pair, policy: Policy, *, alone: bool = True) -> bool:
    if name == "collective" and alone and policy.transports != ("collective",):
        return False
    return all(name in hello.transports for hello in pair) and ORACLE[name](*pair)


@given(pairs(), POLICIES)
@settings(max_examples=600, deadline=None)
def test_never_a_transport_whose_needs_are_unmet_and_always_the_first_whose_needs_are_met(
    pair: Pair, policy: Policy
) -> None:
    wanted = next((name for name in policy.transports if usable(name, pair, policy)), None)
    found = attempt(pair, policy)
    if wanted is None:
        assert isinstance(found, str)
        return
    assert isinstance(found, Choice)
    assert found.transport == wanted
    assert tuple(found.why_not) == policy.transports[: policy.transports.index(wanted)]
    assert all(found.why_not.values())
    way = "scm" if scm(*pair) else "pidfd"
    assert found.fd == (way if wanted in ("cuda_fd", "host_fd") else "")


# --- a capability more -----------------------------------------------------------------------------------------------


def better_gpus(pair: Pair) -> Pair:
    """Every GPU that is there can do everything."""
    for side in (trainer, engine):
        own = pair[side is engine].facts.gpu.devices
        good = [put(put(put(each, "vmm", True), "posix_fd", True), "compute_mode", "default") for each in own]
        pair = side(pair, "facts.gpu.devices", tuple(put(each, "peers", (GPU, OTHER_GPU)) for each in good))
    return pair


def more_gpus(pair: Pair) -> Pair:
    """The engine sees those of the trainer too."""
    own = pair[1].facts.gpu.devices
    known = {each.uuid for each in own}
    others = tuple(each for each in pair[0].facts.gpu.devices if each.uuid not in known)
    return engine(pair, "facts.gpu.devices", own + others)


MORE: list[Edit] = [
    lambda pair: trainer(pair, "reachable", tuple({*pair[0].reachable, "unix", "tcp"})),
    lambda pair: trainer(pair, "reachable", tuple({*pair[0].reachable, "tcp"})),
    lambda pair: both(pair, "transports", BEST_FIRST),
    lambda pair: trainer(pair, "facts.boot_id", pair[1].facts.boot_id),
    lambda pair: engine(pair, "facts.socket_dir", pair[0].facts.socket_dir),
    lambda pair: both(pair, "facts.socket_dir.writable", True),
    lambda pair: trainer(pair, "facts.namespaces", pair[1].facts.namespaces),
    lambda pair: both(pair, "facts.syscalls", best_pair()[0].facts.syscalls),
    lambda pair: both(pair, "facts.memory.nofile_soft", None),
    lambda pair: trainer(pair, "facts.memory.memfd_reserve.verdict", "ok"),
    lambda pair: trainer(pair, "facts.identity.dumpable", True),
    lambda pair: both(pair, "facts.identity.yama_scope", None),
    lambda pair: engine(pair, "facts.capabilities.effective", ("CAP_SYS_PTRACE",)),
    lambda pair: engine(pair, "facts.capabilities.permitted", ("CAP_SYS_PTRACE", "CAP_CHOWN")),
    lambda pair: trainer(pair, "facts.capabilities.permitted", ()),
    lambda pair: engine(pair, "facts.identity.lsm_label", pair[0].facts.identity.lsm_label),  # type: ignore[union-attr]
    lambda pair: engine(pair, "facts.child.verdict", "ok"),
    lambda pair: both(pair, "facts.network", best_pair()[0].facts.network),
    lambda pair: trainer(pair, "memory", "cuda-plain"),
    lambda pair: (put(pair[0], "device", pair[1].device), pair[1]),
    better_gpus,
    more_gpus,
]


def rank(pair: Pair, policy: Policy) -> int:
    found = attempt(pair, policy)
    return policy.transports.index(found.transport) if isinstance(found, Choice) else len(policy.transports)


@given(pairs(), POLICIES, st.sampled_from(MORE))
@settings(max_examples=600, deadline=None)
def test_a_capability_more_never_makes_the_choice_worse(pair: Pair, policy: Policy, more: Edit) -> None:
    assert rank(tried(more, pair), policy) <= rank(pair, policy)


@given(st.lists(pairs(), min_size=1, max_size=3), POLICIES)
@settings(max_examples=200, deadline=None)
def test_all_links_take_the_first_transport_that_suits_them_all(links: list[Pair], policy: Policy) -> None:
    alone = len(links) == 1
    suits = (name for name in policy.transports if all(usable(name, pair, policy, alone=alone) for pair in links))
    wanted = next(suits, None)
    named = {f"link {index}": pair for index, pair in enumerate(links)}
    try:
        choices = choose_common(named, policy)
    except PlanError:
        assert wanted is None
        return
    assert {choice.transport for choice in choices.values()} == {wanted}
    assert list(choices) == list(named)


# --- strict ----------------------------------------------------------------------------------------------------------


def admitted(name: str, pair: Pair, policy: Policy) -> bool:
    """What no setting can change: the host, how many workers, and what GPUs there are."""
    s, r = pair
    if name == "collective" and policy.transports != ("collective",):
        return False
    if name in ("collective", "stream", "disk"):
        return True
    if not one_host(s, r):
        return False
    if name == "host_fd":
        return True
    on_gpu = all(hello.memory != "host" and hello.device and hello.facts.gpu.devices for hello in pair)
    if not on_gpu:
        return False
    seen = [{u for d in hello.facts.gpu.devices for u in (d.uuid, *d.mig)} for hello in (s, r)]
    both_seen = s.device in seen[0] and {s.device, r.device} <= seen[1]
    apart = s.device != r.device and not any(
        d.uuid == r.device and s.device in d.peers for d in r.facts.gpu.devices
    )  # fmt: skip
    if both_seen and apart:
        return False
    return name == "cuda_ipc" or (own(s) and own(r))


@given(pairs(), POLICIES)
@settings(max_examples=600, deadline=None)
def test_strict_never_returns_a_fallback(pair: Pair, policy: Policy) -> None:
    strict = attempt(pair, msgspec.structs.replace(policy, strict=True))
    best = next((name for name in policy.transports if admitted(name, pair, policy)), None)
    if best is not None and usable(best, pair, policy):
        assert isinstance(strict, Choice)
        assert strict.transport == best
        assert strict == attempt(pair, policy)
    else:
        assert isinstance(strict, str)
        if best is not None:
            assert best in strict


def test_the_strategy_reaches_every_transport_both_ways_and_a_refusal() -> None:
    """A property over pairs that never vary would hold for nothing."""
    seen: set[object] = set()

    @given(pairs(), POLICIES)
    @settings(max_examples=1500, deadline=None, database=None, derandomize=True)
    def collect(pair: Pair, policy: Policy) -> None:
        found = attempt(pair, policy)
        seen.add((found.transport, found.fd) if isinstance(found, Choice) else "none")

    collect()
    assert seen >= {
        *(("cuda_fd", way) for way in ("scm", "pidfd")),
        *(("host_fd", way) for way in ("scm", "pidfd")),
        *((name, "") for name in ("cuda_ipc", "stream", "disk")),
        "none",
    }
