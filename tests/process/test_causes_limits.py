"""Limits, folders and namespaces made real, each in a process of its own. Rows of the bug log by their number."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncstack.facts import (
    Facts,
    collect,
    probe_child,
    route_to,
)
from syncstack.seccomp.apply import apply
from syncstack.seccomp.load import load
from syncstack.transports.host_fd.segment import ReceiverSegment, SenderSegment
from tests.process import kernel
from tests.process.alone import alone, is_cause, needs_root

NOBODY = 65534

pytestmark = needs_root


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
    groups = Path("/proc/self/cgroup").read_text()
    own = next((line.split(":", 2)[2] for line in groups.splitlines() if ":memory:" in line), None)
    if own is None:
        kernel.skip(f"no memory controller of cgroup v1: {groups.strip()}")
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
def test_c20_namespaces_tell_who_shares_what() -> None:
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


@alone
def test_a_socket_folder_below_one_that_may_not_be_entered_is_a_fact_and_no_crash(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    tmp_path.chmod(0o700)

    def inside() -> Any:
        os.setuid(NOBODY)
        return msgspec.to_builtins(collect(socket_dir=folder))

    fact = msgspec.convert(kernel.in_child(inside), Facts).socket_dir
    assert fact is not None
    assert not fact.exists and not fact.writable
    assert fact.evidence == f"{folder} cannot be looked at: Permission denied"


@alone
def test_b03_what_others_left_in_dev_shm_takes_no_room_from_weights_and_nothing_of_ours_is_left_there() -> None:
    """A memfd has no name: whoever is killed leaves no file that the next run would have to find and count."""
    kernel.unshare(kernel.NEWNS)
    kernel.mount("tmpfs", "/dev/shm", "size=1m")
    Path("/dev/shm/stale").write_bytes(bytes(900 << 10))
    segment = SenderSegment(4 << 20)
    segment.data[-4:] = b"last"
    receiver = ReceiverSegment(segment.fd, nonce=segment.nonce, data_bytes=4 << 20)
    assert bytes(receiver.data[-4:]) == b"last"
    assert os.listdir("/dev/shm") == ["stale"]
