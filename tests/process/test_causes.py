"""Each cause made real, in a process of its own, and what the facts say of it. Rows of the bug log by their number.

What this kernel cannot have (Yama, SELinux, AppArmor, MIG) is in tests/unit/test_facts_causes.py, from fixtures.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec

from syncstack.facts import (
    Facts,
    TargetFact,
    collect,
    probe_child,
    probe_peer,
    probe_target,
    process,
    say_hello,
)
from syncstack.facts.syscalls import answer_of, call, number_of
from tests.process import kernel
from tests.process.alone import alone, is_cause, needs_root
from tests.process.kernel import Peer

NOBODY = 65534

pytestmark = needs_root


def probe(peer: Peer) -> TargetFact:
    """Probe a peer by what it says of itself, and see that nothing stays open."""
    before = sorted(os.listdir("/proc/self/fd"))
    fact = probe_target(peer.said_pid, peer.fd, peer.claim)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert fact.target == "peer"
    return fact


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
