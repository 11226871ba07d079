"""The one table that both seccomp profiles are generated from.

Every system call of x86_64 and aarch64 has exactly one answer per profile:

* ``ALLOW``  the kernel decides;
* ``EPERM``  forbidden here, said explicitly, so that a program (and our own probes) can tell it from "not there";
* ``ENOSYS`` not there: what a program sees on an older kernel, so that libraries take their fall-back.

Base: the default profile of Docker, ``moby/profiles`` ``seccomp/default.json`` at 02e898b (the rules of module tag
seccomp/v0.2.3 and Docker 29), evaluated for a process *without any capability* on kernel >= 4.8. The names are grouped
here by what they are for. Three deliberate differences from that base, besides the rows of ``ROWS``:

* 32-bit entry points (i386, x32, arm) are not listed as architectures: nothing in the stack is 32-bit, and i386's
  ``socketcall`` goes around every rule on the arguments of ``socket``. A 32-bit call ends the process (SIGSYS).
* Upstream's default answer is EPERM; ours is ENOSYS, because glibc falls back only on ENOSYS (clone3, faccessat2, ...).
  What upstream refuses for lack of a capability is a row with an explicit EPERM here.
* Docker 20.10 ignores ``defaultErrnoRet`` and answers EPERM by default. So that both engines answer alike, every name
  that libseccomp 2.5.4 knows is in this table, also the retired ones. What stays different there: ``personality`` with
  a value that is not listed, and numbers below the highest known one that belong to no call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Literal

import msgspec

EPERM: Final = 1
ENOSYS: Final = 38

ProfileName = Literal["permissive", "restrictive"]
PROFILES: Final[tuple[ProfileName, ...]] = ("permissive", "restrictive")

# Listed explicitly: runc 1.1 leaves out its "unknown number means ENOSYS" stub when a profile names no architecture.
ARCHITECTURES: Final = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")


class Answer(Enum):
    """What a profile answers to one system call."""

    ALLOW = "allow"
    EPERM = "EPERM"
    ENOSYS = "ENOSYS"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """System calls that both profiles treat for one reason; ``names`` holds no duplicates across all rows."""

    names: tuple[str, ...]
    permissive: Answer
    restrictive: Answer
    why: str

    def answer(self, profile: ProfileName) -> Answer:
        """Return this row's answer in ``profile``."""
        return self.permissive if profile == "permissive" else self.restrictive


class ArgRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule on one register argument; the same in both profiles.

    ``op`` is an OCI operator; for ``SCMP_CMP_MASKED_EQ`` ``value`` is the mask and ``value_two`` the wanted result.
    """

    name: str
    answer: Answer
    index: int
    value: int
    op: str
    value_two: int = 0


def _row(names: str, permissive: Answer, restrictive: Answer, why: str) -> Row:
    return Row(names=tuple(sorted(names.split())), permissive=permissive, restrictive=restrictive, why=why)


def _both(answer: Answer, why: str, names: str) -> Row:
    return _row(names, answer, answer, why)


# fmt: off
# What upstream allows to a process without capabilities and both profiles keep. Names of the last group are newer than
# libseccomp 2.5.4, which skips them: such a call then answers ENOSYS, as on an older kernel.
_ALLOWED: Final = (
    _both(Answer.ALLOW, "files and folders", """
        access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
        fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync flock fstat fstatfs fsync ftruncate
        futimesat getcwd getdents getdents64 ioctl lchown link linkat lseek lstat mkdir mkdirat mknod mknodat
        name_to_handle_at newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead
        readlink readlinkat readv rename renameat renameat2 rmdir stat statfs statx symlink symlinkat sync
        sync_file_range syncfs truncate umask unlink unlinkat utime utimensat utimes write writev cachestat"""),
    _both(Answer.ALLOW, "extended attributes", """
        fgetxattr flistxattr fremovexattr fsetxattr getxattr lgetxattr listxattr llistxattr lremovexattr lsetxattr
        removexattr setxattr"""),
    _both(Answer.ALLOW, "pipes, events, asynchronous input and output", """
        epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd
        eventfd2 fanotify_mark inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy
        io_getevents io_pgetevents io_setup io_submit pipe pipe2 poll ppoll pselect6 select sendfile signalfd signalfd4
        splice tee vmsplice"""),
    _both(Answer.ALLOW, "sockets, including the descriptors that sendmsg carries (SCM_RIGHTS)", """
        accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg
        sendto setsockopt shutdown socketpair"""),
    _both(Answer.ALLOW, "memory, including memfd_create, which carries the weights", """
        brk madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mlock mlock2 mlockall mmap mprotect
        mremap msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect remap_file_pages"""),
    _both(Answer.ALLOW, "System V and POSIX inter-process communication", """
        mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd semctl semget
        semop semtimedop shmat shmctl shmdt shmget"""),
    _both(Answer.ALLOW, "processes and threads", """
        arch_prctl execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv futex_wake
        get_robust_list get_thread_area getcpu getpgid getpgrp getpid getppid getsid gettid modify_ldt prctl rseq
        set_robust_list set_thread_area set_tid_address setpgid setsid vfork wait4 waitid"""),
    _both(Answer.ALLOW, "scheduling and limits", """
        getpriority getrlimit getrusage ioprio_get ioprio_set prlimit64 sched_get_priority_max sched_get_priority_min
        sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
        sched_setattr sched_setparam sched_setscheduler sched_yield setpriority setrlimit sysinfo times uname"""),
    _both(Answer.ALLOW, "users and groups (runc itself changes to the container's user under the filter)", """
        capget capset getegid geteuid getgid getgroups getresgid getresuid getuid setfsgid setfsuid setgid setgroups
        setregid setresgid setresuid setreuid setuid"""),
    _both(Answer.ALLOW, "signals", """
        kill pause restart_syscall rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
        rt_sigtimedwait rt_tgsigqueueinfo sigaltstack tgkill tkill"""),
    _both(Answer.ALLOW, "clocks and timers", """
        adjtimex alarm clock_adjtime clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep
        setitimer time timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create
        timerfd_gettime timerfd_settime"""),
    _both(Answer.ALLOW, "randomness, and filters that only narrow", """
        getrandom landlock_add_rule landlock_create_ruleset landlock_restrict_self seccomp"""),
    _both(Answer.ALLOW, "newer than libseccomp 2.5.4", """
        getxattrat listmount listxattrat mseal removexattrat setxattrat statmount uretprobe"""),
)

# What makes the two profiles, one reason each.
_PROFILE_ROWS: Final = (
    _row("pidfd_getfd", Answer.ALLOW, Answer.EPERM,
         "takes a descriptor out of another process. torch's IPC of expandable_segments memory needs it; syncstack "
         "does not (SCM_RIGHTS). The kernel still asks for the same user, a dumpable target and Yama's consent."),
    _row("kcmp", Answer.ALLOW, Answer.EPERM,
         "tells whether two processes share a resource: the second witness when pidfd_getfd fails, no use otherwise."),
    _row("get_mempolicy mbind set_mempolicy set_mempolicy_home_node", Answer.ALLOW, Answer.EPERM,
         "NUMA placement of one's own memory. Upstream wants CAP_SYS_NICE. vLLM, SGLang and OpenBLAS go on without."),
    _row("pidfd_open", Answer.ALLOW, Answer.EPERM,
         "names another process by a descriptor, the first step of pidfd_getfd. asyncio and psutil fall back."),
    _row("pidfd_send_signal process_mrelease", Answer.ALLOW, Answer.EPERM,
         "the rest of the pidfd family. Without pidfd_open a pidfd comes from clone(CLONE_PIDFD), for which kill() "
         "does the same, or from a peer's message, by which a peer could point at a process of another container."),
    _row("process_vm_readv process_vm_writev ptrace", Answer.ALLOW, Answer.EPERM,
         "read, write or steer another process. Upstream allows them to all on kernel >= 4.8. Debuggers, py-spy and "
         "UCX's cma transport want them; nothing that trains or serves here does."),
)

# Refused by upstream to a process without capabilities, or to everybody; refused by both profiles.
_FORBIDDEN: Final = (
    _both(Answer.EPERM, "acts on another process's memory; upstream wants CAP_SYS_PTRACE", "process_madvise"),
    _both(Answer.EPERM, "moves pages of any process between NUMA nodes; upstream never allows it",
          "migrate_pages move_pages"),
    _both(Answer.EPERM, "kernel attack surface that upstream never allows: page faults handled by the caller stretch "
          "race windows; a ring does its work past per-call filters. libuv (TCPStore, uvloop) falls back to epoll.",
          "io_uring_enter io_uring_register io_uring_setup userfaultfd"),
    _both(Answer.EPERM, "the kernel's key rings are not separated by container", "add_key keyctl request_key"),
    _both(Answer.EPERM, "namespaces and mounts: the way out of a container; upstream wants CAP_SYS_ADMIN", """
        chroot fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree pivot_root setns umount2
        unshare"""),
    _both(Answer.EPERM, "programs, counters and modules inside the kernel", """
        bpf delete_module finit_module init_module kexec_file_load kexec_load lookup_dcookie perf_event_open syslog"""),
    _both(Answer.EPERM, "opens files by number, past the path and its permissions", "open_by_handle_at"),
    _both(Answer.EPERM, "state of the whole machine", """
        acct clock_settime fanotify_init ioperm iopl quotactl quotactl_fd reboot setdomainname sethostname settimeofday
        swapoff swapon vhangup"""),
    _both(Answer.EPERM, "labels of a security module; upstream wants CAP_SYS_ADMIN",
          "lsm_get_self_attr lsm_list_modules lsm_set_self_attr"),
)

_ABSENT: Final = (
    _both(Answer.ENOSYS, "its flags lie in memory, where a filter cannot see namespace flags; glibc falls back to "
          "clone on ENOSYS and fails to start any thread on EPERM", "clone3"),
    _both(Answer.ENOSYS, "retired or never built into a kernel", """
        _sysctl afs_syscall create_module get_kernel_syms getpmsg nfsservctl putpmsg query_module security sysfs tuxcall
        uselib ustat vserver"""),
)

# fmt: on
ROWS: Final[tuple[Row, ...]] = (*_ALLOWED, *_PROFILE_ROWS, *_FORBIDDEN, *_ABSENT)

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
NAMESPACE_FLAGS: Final = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
# Address families that upstream leaves out: DECNET, ECONET, ATMSVC, IRDA, WANPIPE, ISDN, CAIF (retired or unused),
# ALG (38, CVE-2026-31431) and VSOCK (40, reaches the hypervisor).
REFUSED_FAMILIES: Final = (12, 19, 20, 23, 25, 34, 37, 38, 40)
HIGHEST_FAMILY: Final = 45
PERSONALITIES: Final = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)


def arg_rules() -> Sequence[ArgRule]:
    """Return the rules on arguments, the same for both profiles.

    The refusals are spelled out (a flag, a family at a time): no operator says "mask not equal", and a rule without
    arguments would override the others.
    """
    clone = [ArgRule(name="clone", answer=Answer.ALLOW, index=0, value=sum(NAMESPACE_FLAGS), op="SCMP_CMP_MASKED_EQ")]
    clone += [
        ArgRule(name="clone", answer=Answer.EPERM, index=0, value=flag, value_two=flag, op="SCMP_CMP_MASKED_EQ")
        for flag in NAMESPACE_FLAGS
    ]
    socket = [
        ArgRule(
            name="socket",
            answer=Answer.EPERM if family in REFUSED_FAMILIES else Answer.ALLOW,
            index=0,
            value=family,
            op="SCMP_CMP_EQ",
        )
        for family in range(HIGHEST_FAMILY + 1)
    ]
    socket.append(ArgRule(name="socket", answer=Answer.EPERM, index=0, value=HIGHEST_FAMILY, op="SCMP_CMP_GT"))
    personality = [
        ArgRule(name="personality", answer=Answer.ALLOW, index=0, value=value, op="SCMP_CMP_EQ")
        for value in PERSONALITIES
    ]
    return [*clone, *socket, *personality]


# For people: what the rules on arguments mean.
ARG_NOTES: Final[Mapping[str, str]] = {
    "clone": "allowed without namespace flags, EPERM with any of them",
    "socket": "allowed for the address families that upstream allows (unix, inet, inet6, netlink, packet, ...); EPERM "
    "for AF_ALG, AF_VSOCK and other unused ones",
    "personality": "allowed for 0x0, 0x8, 0x20000, 0x20008 and 0xffffffff (query); ENOSYS otherwise",
}
