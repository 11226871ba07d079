"""What a profile must let through for syncstack and the engines, and what it must not let through at all.

The needs were found by refusing one call at a time to a sender, a receiver and torch (EPERM and ENOSYS each, glibc
2.36, x86_64); for Ray, gloo and runc in the same way before. A call that the machine does not have (``poll`` on
aarch64) is no need there.
"""

from __future__ import annotations

from typing import Final

import msgspec

from syncstack.seccomp.compile import REACHED, Reader


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """A system call that somebody makes: ``who``, and what happens to them ``without`` it.

    ``required``: something ends; otherwise something better is missed. ``fine`` are answers that do as well as
    reaching the kernel. ``args`` narrow the call down, such as a socket's address family.
    """

    name: str
    who: str
    without: str
    required: bool = True
    args: tuple[int, ...] = ()
    fine: frozenset[str] = frozenset()

    def met(self, reader: Reader) -> bool:
        """Return whether a profile's answers to it will all do."""
        return reader.answers(self.name, self.args) <= REACHED | self.fine

    @property
    def shown(self) -> str:
        """The call as people read it."""
        return call_text(self.name, self.args)


class Danger(msgspec.Struct, frozen=True, kw_only=True):
    """A system call that no container of ours may reach, and ``why``."""

    name: str
    why: str
    args: tuple[int, ...] = ()

    @property
    def shown(self) -> str:
        """The call as people read it."""
        return call_text(self.name, self.args)


_ARGS: Final = {
    ("clone", 0x003D0F00): "thread",
    ("clone", 0x01200011): "fork",
    ("clone", 0x10000000): "CLONE_NEWUSER",
    ("socket", 1): "AF_UNIX",
    ("socket", 2): "AF_INET",
    ("socket", 10): "AF_INET6",
    ("socket", 38): "AF_ALG",
    ("socket", 40): "AF_VSOCK",
}
_ENOSYS_IS_FINE: Final = frozenset({"ENOSYS"})


def call_text(name: str, args: tuple[int, ...]) -> str:
    """Return a call with what its first argument means."""
    return f"{name}({_ARGS.get((name, args[0]), hex(args[0]))})" if args else name


def _needs(names: str, who: str, without: str, *, required: bool = True) -> tuple[Need, ...]:
    return tuple(Need(name=name, who=who, without=without, required=required) for name in names.split())


def _dangers(names: str, why: str) -> tuple[Danger, ...]:
    return tuple(Danger(name=name, why=why) for name in names.split())


NEEDS: Final[tuple[Need, ...]] = (
    *_needs("arch_prctl close execve ioctl mmap mprotect munmap newfstatat openat read write",
            "every Python program", "it does not start"),
    *_needs("getdents64 mkdir rt_sigreturn uname unlink", "every Python program", "imports, temporary files or signals "
            "fail"),
    *_needs("clock_nanosleep futex pipe2 rt_sigprocmask wait4", "threads and child processes", "they fail or abort"),
    Need(name="clone3", who="glibc >= 2.34, for every thread", fine=_ENOSYS_IS_FINE,
         without="no thread can be started (OpenBLAS and libgomp exit, Python says \"can't start new thread\"). ENOSYS "
         "would do: glibc then uses clone"),
    Need(name="clone", args=(0x003D0F00,), who="threads, where clone3 is not there",
         without="no thread can be started"),
    Need(name="clone", args=(0x01200011,), who="fork: multiprocessing, vLLM's workers, Ray",
         without="no child process can be made"),
    *_needs("fcntl ftruncate memfd_create", "host_fd: the sealed memory that carries the weights; CUDA needs "
            "memfd_create as well", "the zero-copy transport is off; CUDA does not initialise (error 304)"),
    *_needs("bind connect getsockopt listen poll recvmsg sendmsg", "the link between trainer and engine (unix socket, "
            "SCM_RIGHTS, SO_PEERCRED)", "no refit by host_fd"),
    Need(name="accept4", who="the link between trainer and engine", fine=_ENOSYS_IS_FINE,
         without="no refit by host_fd. ENOSYS would do: Python then uses accept"),
    Need(name="socket", args=(1,), who="the link between trainer and engine", without="no refit by host_fd"),
    Need(name="socket", args=(2,), who="the engine's HTTP server, gloo, NCCL", without="no control plane"),
    Need(name="socket", args=(10,), who="IPv6 networks", without="IPv4 alone", required=False),
    *_needs("epoll_ctl epoll_wait getsockname recvfrom sendto socketpair", "the HTTP server and its clients (asyncio)",
            "no control plane"),
    *_needs("prctl", "gloo's and Ray's child processes", "they do not start"),
    *_needs("lseek", "torch's import, which reads its own source", "\"could not get source code\""),
    *_needs("fallocate", "torch's shared memory, in DataLoader workers", "\"unable to allocate shared memory\""),
    *_needs("prlimit64", "Ray", "its nodes do not start"),
    *_needs("sched_getaffinity", "vLLM's CPU worker, torch's DataLoader", "PermissionError"),
    Need(name="faccessat2", who="runc, which starts the container under the filter", fine=_ENOSYS_IS_FINE,
         without="\"exec ...: operation not permitted\". ENOSYS would do: it then uses faccessat"),
    *_needs("capget capset chdir fchown fstatfs getcwd getppid setgid setgroups setuid",
            "runc, which starts the container under the filter",
            "\"unable to start container process: operation not permitted\""),
    *_needs("pidfd_getfd pidfd_open", "fd passing by pidfd, where no folder is shared; torch's IPC of "
            "expandable_segments memory; UCX", "syncstack passes descriptors by SCM_RIGHTS; torch's IPC fails with "
            "expandable_segments:True", required=False),
    *_needs("kcmp", "the doctor's second witness", "a refused pidfd_getfd is explained less well", required=False),
    *_needs("get_mempolicy mbind set_mempolicy", "NUMA placement in vLLM, SGLang, OpenBLAS", "memory lies where it "
            "lies", required=False),
    *_needs("process_vm_readv process_vm_writev", "UCX's cma transport, py-spy", "UCX takes another; no py-spy",
            required=False),
    *_needs("ptrace", "debuggers, `syncstack seccomp record`", "none inside the container", required=False),
    *_needs("mlock mremap sched_setaffinity", "pinned memory, large reallocations, thread placement", "slower",
            required=False),
)  # fmt: skip

DANGERS: Final[tuple[Danger, ...]] = (
    *_dangers("fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree pivot_root umount2",
              "mounts: the way out of a container"),
    *_dangers("setns unshare", "namespaces: all capabilities inside a new one, and the kernel code behind them"),
    Danger(name="clone", args=(0x10000000,), why="namespaces: as unshare"),
    Danger(name="clone3", why="namespaces: its flags lie in memory, where no filter sees them"),
    *_dangers("bpf perf_event_open", "programs and counters inside the kernel"),
    *_dangers("delete_module finit_module init_module kexec_file_load kexec_load", "the kernel itself"),
    *_dangers("open_by_handle_at", "any file of the host by its number, past paths and permissions"),
    *_dangers("io_uring_enter io_uring_register io_uring_setup", "a ring does its work past every filter"),
    *_dangers("userfaultfd", "stretches the kernel's race windows"),
    *_dangers("add_key keyctl request_key", "the kernel's key rings are not separated by container"),
    *_dangers("ioperm iopl", "the hardware's ports"),
    *_dangers("acct clock_settime quotactl reboot settimeofday swapoff swapon syslog",
              "the state of the whole machine"),
    Danger(name="socket", args=(38,), why="AF_ALG: the kernel's crypto code (CVE-2026-31431)"),
    Danger(name="socket", args=(40,), why="AF_VSOCK: the hypervisor"),
)  # fmt: skip


def needs_of(name: str) -> tuple[Need, ...]:
    """Return who needs a call, by its name."""
    return tuple(need for need in NEEDS if need.name == name)
