"""Each cause made real, in a process of its own, and what the facts say of it. Rows of the bug log by their number.

What this kernel cannot have (Yama, SELinux, AppArmor, MIG) is in tests/unit/test_facts_causes.py, from fixtures.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncstack.facts import (
    Facts,
    TargetFact,
    collect,
    probe_child,
    probe_peer,
    probe_target,
    process,
    route_to,
    say_hello,
)
from syncstack.facts.syscalls import answer_of, call, number_of
from syncstack.seccomp.apply import apply
from syncstack.seccomp.load import load
from tests.process import kernel
from tests.process.kernel import Peer

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root is needed to make the causes")


def alone(scenario: Callable[..., None]) -> Callable[..., None]:
    """Run the test's body in a fresh process: what it does to itself cannot be undone. Arguments are paths."""

    @functools.wraps(scenario)
    def test(**given: Path) -> None:
        code = f"from {__name__} import {scenario.__name__} as test; import json, sys, pathlib; "
        code += "test.__wrapped__(**{k: pathlib.Path(v) for k, v in json.loads(sys.argv[1]).items()})"
        paths = json.dumps({name: str(path) for name, path in given.items()})
        # Into a file: a forked peer that is left over would keep a pipe open.
        with tempfile.TemporaryFile("w+") as output:
            child = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", code, paths],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = child.wait(60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            output.seek(0)
            text = output.read()
        if status == kernel.SKIPPED:
            pytest.skip(text)
        assert status == 0, text

    return test


def probe(peer: Peer) -> TargetFact:
    """Probe a peer by what it says of itself, and see that nothing stays open."""
    before = sorted(os.listdir("/proc/self/fd"))
    fact = probe_target(peer.said_pid, peer.fd, peer.claim)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert fact.target == "peer"
    return fact


def is_cause(fact: TargetFact, verdict: str, cause: str, *evidence: str) -> None:
    assert (fact.verdict, fact.cause) == (verdict, cause), fact
    for text in evidence:
        assert text in fact.evidence, (text, fact)


def no_filter() -> bool:
    return process.status()["Seccomp"] == "0"


@alone
def test_nothing_in_the_way() -> None:
    peer = Peer()
    is_cause(probe(peer), "ok", "none", "pidfd_getfd = ok", "as it said")
    is_cause(probe_child(), "ok", "none", "is our child")
    peer.end()


@alone
def test_a01_a_filter_that_answers_eperm() -> None:
    peer = Peer()
    kernel.deny("pidfd_getfd", errno.EPERM)
    assert kernel.raw_getfd(peer.pid, peer.fd) == "EPERM"
    is_cause(probe(peer), "denied", "seccomp", "pidfd_getfd(-1, 0, 0) = EPERM")
    is_cause(probe_child(), "denied", "seccomp")
    facts = collect()
    assert facts.child is not None
    assert (facts.child.cause, facts.pidfd_getfd.verdict) == ("seccomp", "denied")
    peer.end()


@alone
def test_a01_a_filter_on_pidfd_open_only() -> None:
    peer = Peer()
    kernel.deny("pidfd_open", errno.EPERM)
    is_cause(probe(peer), "denied", "seccomp", "pidfd_getfd(-1, 0, 0) = EBADF", "pidfd_open = EPERM")
    peer.end()


@alone
def test_a02_a_peer_that_is_not_dumpable() -> None:
    """No filter, one user, and still EPERM: no capability is needed where the sender can allow it itself."""
    peer = Peer(functools.partial(kernel.become, NOBODY, NOBODY, visible=False))
    kernel.become(NOBODY, NOBODY)
    assert no_filter()
    assert kernel.raw_getfd(peer.pid, peer.fd) == "EPERM"
    # With what it says of itself, and from outside alone.
    is_cause(probe(peer), "denied", "non-dumpable", "kcmp = EPERM", "/proc/T/ns/user = EACCES")
    silent = msgspec.structs.replace(peer.claim, dumpable=None)
    is_cause(probe_target(peer.pid, peer.fd, silent), "denied", "non-dumpable", "root as the owner")


@alone
def test_a02_a_root_peer_that_is_not_dumpable() -> None:
    """Root leaves no sign of it in /proc: what is left when everything else is ruled out."""
    peer = Peer(lambda: (kernel.drop(kernel.SYS_PTRACE), kernel.libc.prctl(kernel.PR_SET_DUMPABLE, 0, 0, 0, 0)))
    kernel.drop(kernel.SYS_PTRACE)
    is_cause(probe(peer), "denied", "non-dumpable", "it says")
    silent = msgspec.structs.replace(peer.claim, dumpable=None)
    is_cause(probe_target(peer.pid, peer.fd, silent), "denied", "non-dumpable", "no sign")
    peer.end()


@alone
def test_a02_cap_sys_ptrace_opens_what_is_not_dumpable() -> None:
    peer = Peer(lambda: kernel.libc.prctl(kernel.PR_SET_DUMPABLE, 0, 0, 0, 0))
    assert peer.claim.dumpable is False
    is_cause(probe(peer), "ok", "none")
    peer.end()


@alone
def test_another_user() -> None:
    peer = Peer(functools.partial(kernel.become, 65533, NOBODY))
    kernel.become(NOBODY, NOBODY)
    is_cause(probe(peer), "denied", "uid", "uid 65534 here, 65533, 65533, 65533 there")


@alone
def test_another_group_only() -> None:
    peer = Peer(functools.partial(kernel.become, NOBODY, 65533))
    kernel.become(NOBODY, NOBODY)
    is_cause(probe(peer), "denied", "uid", "gid 65534 here, 65533, 65533, 65533 there")


@alone
def test_root_without_cap_sys_ptrace_and_another_user() -> None:
    """The usual root of a container."""
    peer = Peer(functools.partial(kernel.become, NOBODY, NOBODY))
    kernel.drop(kernel.SYS_PTRACE)
    is_cause(probe(peer), "denied", "uid", "uid 0 here")
    peer.end()


@alone
def test_a_capability_that_the_peer_has_and_we_lack() -> None:
    peer = Peer()
    kernel.drop(kernel.SYS_PTRACE, kernel.CHOWN)
    is_cause(probe(peer), "denied", "capability", "CAP_CHOWN, CAP_SYS_PTRACE")
    peer.end()


@alone
def test_a37_no_capability_at_all_between_equals() -> None:
    """One user, no capability, no_new_privs: nothing is missing."""
    peer = Peer(functools.partial(kernel.become, NOBODY, NOBODY))
    kernel.become(NOBODY, NOBODY)
    assert int(process.status()["CapPrm"], 16) == 0
    is_cause(probe(peer), "ok", "none")
    facts = collect()
    assert facts.child is not None
    assert (facts.child.cause, facts.syscalls["memfd_create"].verdict) == ("none", "ok")


@alone
def test_another_user_namespace() -> None:
    """All capabilities of a namespace of one's own are worth nothing outside of it."""
    peer = Peer()

    def inside() -> Any:
        kernel.own_user_namespace(0)
        assert int(process.status()["CapEff"], 16) >> kernel.SYS_PTRACE & 1
        silent = msgspec.structs.replace(peer.claim, user_namespace="")
        return [msgspec.to_builtins(fact) for fact in (probe(peer), probe_target(peer.pid, peer.fd, silent))]

    told, silent = (msgspec.convert(fact, TargetFact) for fact in kernel.in_child(inside))
    is_cause(told, "denied", "user-namespace", peer.claim.user_namespace, "kcmp = EPERM")
    is_cause(silent, "denied", "user-namespace", "counts in this user namespace only")
    peer.end()


@alone
def test_a36_a_remapped_user() -> None:
    def inside() -> Any:
        kernel.own_user_namespace(1000)
        return msgspec.to_builtins(collect())

    facts = msgspec.convert(kernel.in_child(inside), Facts)
    assert facts.identity is not None
    assert (facts.identity.uid_map, facts.identity.remapped) == ("1000 0 1", True)
    here = collect().identity
    assert here is not None
    assert not here.remapped


def own_proc() -> None:
    """As a container does: a /proc of the new PID namespace."""
    kernel.unshare(kernel.NEWNS)
    kernel.mount("proc", "/proc")


@alone
def test_a08_a_peer_in_another_pid_namespace() -> None:
    peer = Peer()
    kernel.unshare(kernel.NEWPID)

    def inside() -> Any:
        own_proc()
        assert kernel.raw_getfd(peer.pid, peer.fd) == "pidfd_open: ESRCH"
        return msgspec.to_builtins(probe(peer))

    fact = msgspec.convert(kernel.in_child(inside), TargetFact)
    is_cause(fact, "absent", "pid-namespace", "not opened", peer.claim.pid_namespace)
    assert "pidfd_open" not in fact.evidence
    peer.end()


@alone
def test_a08_a_stranger_with_the_peers_number() -> None:
    """The peer says "process 1". Here that is somebody else, whose descriptor the kernel would hand out."""
    peer = Peer(own_proc, namespace=kernel.NEWPID)
    assert peer.said_pid == 1

    def stranger() -> Any:
        own_proc()
        assert os.getpid() == 1
        fd = os.memfd_create("stranger")
        peers = msgspec.structs.replace(peer.claim, start_ticks=kernel.hello()["claim"]["start_ticks"])

        def receiver() -> Any:
            assert kernel.raw_getfd(1, fd) == "ok"  # the wrong descriptor, and no error
            return msgspec.to_builtins(probe_target(peer.said_pid, fd, peers))

        return kernel.in_child(receiver)

    def inside() -> Any:
        kernel.unshare(kernel.NEWPID)
        return kernel.in_child(stranger)

    is_cause(msgspec.convert(kernel.in_child(inside), TargetFact), "absent", "pid-namespace", "not opened")
    peer.end()


@alone
def test_a08_a_proc_of_another_pid_namespace() -> None:
    """A number cannot be proven where /proc counts differently; here its /proc/PID is a stranger's or nobody's."""
    kernel.unshare(kernel.NEWPID)

    def inside() -> Any:
        kernel.unshare(kernel.NEWNS)
        reading, writing = os.pipe()
        peer = os.fork()
        if peer == 0:
            os.read(reading, 1)
            os._exit(0)
        claim = msgspec.convert(kernel.hello()["claim"], kernel.Claim)
        fact = probe_target(peer, 0, claim)
        os.close(writing)
        return msgspec.to_builtins(fact)

    fact = msgspec.convert(kernel.in_child(inside), TargetFact)
    is_cause(fact, "absent", "pid-namespace", "/proc is that of another PID namespace")


@alone
def test_a09_two_peers_that_are_both_process_1() -> None:
    def inside() -> Any:
        def say() -> Any:
            own_proc()
            return msgspec.to_builtins(say_hello("trainer", facts=collect()))

        kernel.unshare(kernel.NEWPID)
        return kernel.in_child(say)

    one, two = (kernel.in_child(inside) for _ in range(2))
    assert (one["pid"], two["pid"]) == (1, 1)
    assert one["nonce"] != two["nonce"]
    assert one["facts"]["namespaces"]["pid"] != two["facts"]["namespaces"]["pid"]


@alone
def test_a_forked_process_has_a_nonce_of_its_own() -> None:
    mine = say_hello("trainer").nonce
    assert say_hello("trainer").nonce == mine
    assert kernel.in_child(lambda: say_hello("trainer").nonce) != mine


@alone
def test_a04_a_descriptor_that_is_not_there() -> None:
    """EBADF comes after every permission was given."""
    peer = Peer()
    is_cause(probe_target(peer.pid, 999, peer.claim), "absent", "bad-descriptor", "the call is permitted")
    peer.end()


@alone
def test_a_peer_that_is_gone() -> None:
    peer = Peer()
    os.kill(peer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
    is_cause(probe(peer), "absent", "target-gone", "has ended (state Z)")
    os.waitpid(peer.pid, 0)
    is_cause(probe(peer), "absent", "target-gone", "there is no process")


@alone
def test_a_number_that_was_used_again() -> None:
    """The process that has the number now started at another time; it is never opened."""
    peer = Peer()
    earlier = msgspec.structs.replace(peer.claim, start_ticks=peer.claim.start_ticks - 100)
    fact = probe_target(peer.pid, peer.fd, earlier)
    is_cause(fact, "absent", "target-gone", f"started at tick {peer.claim.start_ticks}")
    assert "pidfd_open" not in fact.evidence
    peer.end()


@alone
def test_a_claim_that_proves_nothing() -> None:
    peer = Peer()
    elsewhere = msgspec.structs.replace(peer.claim, boot_id="another")
    is_cause(probe_target(peer.pid, peer.fd, elsewhere), "absent", "pid-namespace", "another machine")
    unknown = msgspec.structs.replace(peer.claim, pid_namespace="")
    is_cause(probe_target(peer.pid, peer.fd, unknown), "denied", "unknown", "PID namespace")
    peer.end()


@alone
def test_a_hello_is_enough_to_probe_its_sender() -> None:
    is_cause(probe_peer(say_hello("engine"), 0), "ok", "none")


@alone
def test_a30_enosys_means_not_there(tmp_path: Path) -> None:
    """Behind a filter of ours; then in what says that it is gVisor, by a text over /proc/version."""
    peer = Peer()
    kernel.deny("pidfd_getfd", errno.ENOSYS)
    is_cause(probe(peer), "absent", "seccomp", "a filter hides the call", "= ENOSYS")
    kernel.unshare(kernel.NEWNS)
    (tmp_path / "version").write_text("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016 gVisor")
    kernel.bind(tmp_path / "version", "/proc/version")
    is_cause(probe(peer), "absent", "sandbox", "the sandbox lacks the call")
    facts = collect()
    assert facts.child is not None
    assert (facts.runtime.value, facts.child.cause) == ("gvisor", "sandbox")
    assert facts.pidfd_getfd.verdict == "absent"
    peer.end()


@alone
def test_a33_ptrace_works_and_pidfd_getfd_does_not() -> None:
    """Nothing is inferred from ptrace: the very call is made."""
    peer = Peer()
    kernel.deny("pidfd_getfd", errno.EPERM)
    assert answer_of(*call(number_of("ptrace"), 0x4206, peer.pid, 0, 0)) == "ok"
    is_cause(probe(peer), "denied", "seccomp")
    assert collect().syscalls["ptrace"].verdict == "ok"
    os.kill(peer.pid, signal.SIGKILL)


@alone
def test_a_security_module() -> None:
    """Landlock stands for SELinux and AppArmor: root, with every capability, and still EPERM."""
    peer = Peer()
    handled = (ctypes.c_uint64 * 1)(1)  # any right: a domain of one's own is what counts
    ruleset, code = call(444, ctypes.addressof(handled), 8, 0)
    if ruleset < 0:
        kernel.skip(f"landlock_create_ruleset: {os.strerror(code)}")
    assert call(446, ruleset, 0) == (0, 0)
    os.close(ruleset)
    is_cause(probe(peer), "denied", "lsm", "kcmp = EPERM", "CAP_SYS_PTRACE would open every other gate")


@alone
def test_a_security_module_without_capabilities() -> None:
    peer = Peer(functools.partial(kernel.become, NOBODY, NOBODY))
    handled = (ctypes.c_uint64 * 1)(1)
    ruleset, code = call(444, ctypes.addressof(handled), 8, 0)
    if ruleset < 0:
        kernel.skip(f"landlock_create_ruleset: {os.strerror(code)}")
    kernel.become(NOBODY, NOBODY)
    kernel.libc.prctl(38, 1, 0, 0, 0)  # no_new_privs, which it demands here
    assert call(446, ruleset, 0) == (0, 0)
    os.close(ruleset)
    is_cause(probe(peer), "denied", "lsm", "same ids, dumpable")
    silent = msgspec.structs.replace(peer.claim, dumpable=None)
    is_cause(probe_target(peer.pid, peer.fd, silent), "denied", "lsm", "same ids, dumpable")


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@alone
def test_the_child_of_the_probe_leaves_nothing() -> None:
    """With threads about, and with SIGCHLD ignored, where the kernel reaps before anybody can wait."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    is_cause(probe_child(), "ok", "none")
    assert children() == []
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    is_cause(probe_child(), "ok", "none")
    assert children() == []
    stop.set()
    thread.join()


@alone
def test_b01_a_dev_shm_of_one_mebibyte() -> None:
    """A file of 4 MiB can be made there; only the reservation says that it cannot be filled. A memfd lies elsewhere."""
    kernel.unshare(kernel.NEWNS)
    kernel.mount("tmpfs", "/dev/shm", "size=1m")
    descriptor = os.open("/dev/shm/segment", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 4 << 20)
    with pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(descriptor, 0, 4 << 20)
    memory = collect().memory
    assert (memory.shm_bytes, memory.shm_free_bytes) == (1 << 20, 1 << 20)
    assert memory.memfd_reserve is not None
    assert memory.memfd_reserve.verdict == "ok"


@alone
def test_b01_a_reservation_that_is_refused() -> None:
    kernel.deny("fallocate", errno.ENOSPC)
    fact = collect().memory.memfd_reserve
    assert fact is not None
    assert (fact.verdict, fact.evidence) == ("denied", "posix_fallocate(memfd, 0, 65536) = ENOSPC")


@alone
def test_b06_a_volume_that_promises_more_than_the_limit() -> None:
    """statvfs says what the machine has; the group of this process allows less."""
    limit = 256 << 20
    own = next(
        line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line
    )
    group = Path(f"/sys/fs/cgroup/memory{own}/syncstack-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        kernel.skip(f"{group}: {error.strerror}")

    def inside() -> Any:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        return msgspec.to_builtins(collect())

    try:
        memory = msgspec.convert(kernel.in_child(inside), Facts).memory
    finally:
        group.rmdir()
    assert memory.shm_free_bytes is not None
    assert memory.available_bytes is not None
    assert min(memory.shm_free_bytes, memory.available_bytes) > limit
    assert (memory.cgroup_version, memory.cgroup_limit_bytes) == ("v1", limit)
    assert memory.budget_bytes is not None
    assert memory.budget_bytes <= limit
    assert f"{group}/memory.limit_in_bytes: {limit}" in memory.evidence


@alone
def test_b08_one_name_and_two_folders(tmp_path: Path) -> None:
    """Each container has its own; device and inode say so, and say when it is one."""
    here = collect(socket_dir=tmp_path).socket_dir

    def inside(*, private: bool) -> Any:
        kernel.unshare(kernel.NEWNS)
        if private:
            kernel.mount("tmpfs", tmp_path)
        return msgspec.to_builtins(collect(socket_dir=tmp_path).socket_dir)

    assert here is not None
    shared, private = (kernel.in_child(functools.partial(inside, private=value)) for value in (False, True))
    assert (shared["device"], shared["inode"]) == (here.device, here.inode)
    assert (private["device"], private["inode"]) != (here.device, here.inode)
    assert (private["path"], private["mounted"]) == (here.path, True)


@alone
def test_b14_locked_memory_that_no_capability_raises() -> None:
    """CAP_IPC_LOCK in the bounding set changes nothing for a user without effective capabilities."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    kernel.become(NOBODY, NOBODY)
    facts = collect()
    assert (facts.memory.memlock_soft_bytes, facts.memory.memlock_hard_bytes) == (64 << 10, 64 << 10)
    assert "CAP_IPC_LOCK" in facts.capabilities.bounding
    assert "CAP_IPC_LOCK" not in facts.capabilities.effective
    buffer = ctypes.create_string_buffer(1 << 20)
    assert kernel.libc.mlock(buffer, 1 << 20) == -1
    assert ctypes.get_errno() == errno.ENOMEM


@alone
def test_the_limit_on_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 64))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    memory = collect().memory
    assert (memory.nofile_soft, memory.nofile_hard) == (40, 64)
    assert len(held) + 3 <= memory.nofile_open <= 30
    # Not one is left: a probe says so, and names no permission.
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    is_cause(probe_child(), "denied", "unknown", "no child could be started: Too many open files")


@alone
def test_facts_under_the_restrictive_profile() -> None:
    """What it denies is one cause; everything else is still found out."""
    apply(load("restrictive"))
    facts = collect()
    assert facts.child is not None
    is_cause(facts.child, "denied", "seccomp")
    assert facts.memory.memfd_reserve is not None
    assert facts.memory.memfd_reserve.verdict == "ok"
    assert "lo" in [each.name for each in facts.network.interfaces]
    assert facts.identity is not None


@alone
def test_addresses_of_both_families_and_the_way_to_a_peer() -> None:
    """In a network namespace of its own, with two addresses of each family on one interface."""
    kernel.unshare(kernel.NEWNET)
    assert route_to("192.0.2.9").evidence.endswith("ENETUNREACH")
    for command in (
        "link add one type veth peer name two",
        "link set two up",
        "address add 192.0.2.1/24 dev one",
        "address add 192.0.2.2/24 dev one label one:alias",
        "address add 2001:db8::1/64 dev one nodad",
        "address add 2001:db8::2/64 dev one nodad",
        "link set one mtu 1400 up",
    ):
        try:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            kernel.skip(f"ip {command}: {error}")
    one = next(each for each in collect().network.interfaces if each.name == "one")
    assert (one.up, one.loopback, one.mtu, one.ipv4) == (True, False, 1400, ("192.0.2.1", "192.0.2.2"))
    assert {"2001:db8::1", "2001:db8::2"} <= set(one.ipv6)
    assert (route_to("192.0.2.9").interface, route_to("192.0.2.9").source) == ("one", "192.0.2.1")
    assert route_to("2001:db8::9").interface == "one"
    assert route_to("198.51.100.1").interface == ""


@alone
def test_namespaces_tell_who_shares_what() -> None:
    def inside() -> Any:
        kernel.unshare(kernel.NEWIPC | kernel.NEWNET | kernel.NEWNS)
        return msgspec.to_builtins(collect())

    here, there = collect(), msgspec.convert(kernel.in_child(inside), Facts)
    different = {kind for kind, inode in here.namespaces.items() if there.namespaces[kind] != inode}
    assert different == {"ipc", "net", "mnt"}
    assert here.boot_id == there.boot_id
    # A namespace of its own has a loopback that nobody has brought up, whatever /sys shows.
    assert [
        (each.name, each.up, each.loopback, each.ipv4) for each in there.network.interfaces if each.name == "lo"
    ] == [("lo", False, True, ())]
    assert len(there.network.interfaces) <= len(here.network.interfaces)
