"""Ask the kernel for each system call, with arguments that need no target, change nothing and come before any
permission check of the kernel's own, so that EPERM means a filter wherever that is possible.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from syncstack.facts.model import SyscallFact, Verdict


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One call: its number per machine, its arguments and how they are shown.

    ``note`` names a setting by which the kernel itself answers EPERM, as a file under /proc/sys.
    """

    name: str
    x86_64: int
    aarch64: int
    args: tuple[int, ...]
    shown: str
    sysctl: str | None = None


_PTRACE_SEIZE: Final = 0x4206
_MINUS_ONE: Final = -1

PROBES: Final = (
    # EINVAL: no process has the number -1.
    Probe(name="pidfd_open", x86_64=434, aarch64=434, args=(_MINUS_ONE, 0), shown="pidfd_open(-1, 0)"),
    # EBADF: -1 is no descriptor.
    Probe(name="pidfd_getfd", x86_64=438, aarch64=438, args=(_MINUS_ONE, 0, 0), shown="pidfd_getfd(-1, 0, 0)"),
    # EFAULT: the name is read first. That a memfd really works is asked in probe_memfd.
    Probe(name="memfd_create", x86_64=319, aarch64=279, args=(0, 0), shown="memfd_create(NULL, 0)"),
    # ESRCH.
    Probe(name="kcmp", x86_64=312, aarch64=272, args=(_MINUS_ONE, _MINUS_ONE, 0, 0, 0), shown="kcmp(-1, -1, 0, 0, 0)"),
    # ESRCH: seizes nothing, and PTRACE_SEIZE never makes the caller the traced one.
    Probe(name="ptrace", x86_64=101, aarch64=117, args=(_PTRACE_SEIZE, _MINUS_ONE, 0, 0), shown="ptrace(SEIZE, -1)"),
    # EINVAL: flags must be 0, and are looked at first.
    Probe(
        name="process_vm_readv",
        x86_64=310,
        aarch64=270,
        args=(_MINUS_ONE, 0, 0, 0, 0, 1),
        shown="process_vm_readv(-1, NULL, 0, NULL, 0, 1)",
    ),
    # Success: no flag, nothing to unshare.
    Probe(name="unshare", x86_64=272, aarch64=97, args=(0,), shown="unshare(0)"),
    # EFAULT: the target's path is read before the right to mount is asked for.
    Probe(name="mount", x86_64=165, aarch64=40, args=(0, 0, 0, 0, 0), shown="mount(NULL, NULL, NULL, 0, NULL)"),
    # E2BIG: the size is looked at first since 6.4 or so; before, EPERM where unprivileged bpf is off.
    Probe(
        name="bpf",
        x86_64=321,
        aarch64=280,
        args=(0, 0, 1 << 30),
        shown="bpf(0, NULL, 1 << 30)",
        sysctl="kernel/unprivileged_bpf_disabled",
    ),
    # EINVAL: bit 1 is no flag; bit 0 (user mode only) needs no privilege since 5.11.
    Probe(
        name="userfaultfd",
        x86_64=323,
        aarch64=282,
        args=(3,),
        shown="userfaultfd(3)",
        sysctl="vm/unprivileged_userfaultfd",
    ),
    # EFAULT or EINVAL: no parameters.
    Probe(
        name="io_uring_setup",
        x86_64=425,
        aarch64=425,
        args=(0, 0),
        shown="io_uring_setup(0, NULL)",
        sysctl="kernel/io_uring_disabled",
    ),
    # EOPNOTSUPP: no such operation.
    Probe(name="keyctl", x86_64=250, aarch64=219, args=(_MINUS_ONE, 0, 0, 0, 0), shown="keyctl(-1, 0, 0, 0, 0)"),
    # EINVAL: size 0. EPERM here means that no thread can be started.
    Probe(name="clone3", x86_64=435, aarch64=435, args=(0, 0), shown="clone3(NULL, 0)"),
    # Success: nothing asked for.
    Probe(
        name="get_mempolicy", x86_64=239, aarch64=236, args=(0, 0, 0, 0, 0), shown="get_mempolicy(NULL, NULL, 0, 0, 0)"
    ),
    # EINVAL: no such mode.
    Probe(name="set_mempolicy", x86_64=238, aarch64=237, args=(0x7FFF, 0, 0), shown="set_mempolicy(0x7fff, NULL, 0)"),
    # EINVAL: no such mode.
    Probe(
        name="mbind", x86_64=237, aarch64=235, args=(0, 0, 0x7FFF, 0, 0, 0), shown="mbind(NULL, 0, 0x7fff, NULL, 0, 0)"
    ),
)  # fmt: skip


def call(number: int, *args: int) -> tuple[int, int]:
    """Return (result, errno) of one raw system call with integer arguments; errno is 0 on success."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(arg) for arg in args))
    return result, ctypes.get_errno() if result == -1 else 0


def number_of(name: str) -> int:
    """Return the number of a probed call on this machine, -1 where none is known."""
    probe = next(probe for probe in PROBES if probe.name == name)
    return {"x86_64": probe.x86_64, "aarch64": probe.aarch64}.get(platform.machine(), -1)


def answer_of(result: int, code: int) -> str:
    """Return the answer of a raw call in words: the name of its errno, or ``ok``."""
    return errno.errorcode.get(code, str(code)) if result == -1 else "ok"


def verdict_of(result: int, code: int) -> Verdict:
    """Return what a raw answer means: any errno but EPERM, EACCES and ENOSYS comes from the call's own code."""
    if result != -1:
        return "ok"
    if code in (errno.EPERM, errno.EACCES):
        return "denied"
    return "absent" if code == errno.ENOSYS else "ok"


def _cause(probe: Probe, verdict: Verdict, seccomp_mode: int, sysctls: Path) -> str:
    """Return what else is known about a refusal; empty when the call was reached."""
    if verdict == "ok":
        return ""
    if seccomp_mode == 0:
        text = "; no filter is loaded: the kernel itself says so"
    elif verdict == "absent":
        text = f"; a filter that hides it, or kernel {platform.release()} lacks it"
    else:
        text = "; a seccomp filter is loaded"
    if probe.sysctl is not None and verdict == "denied":
        path = sysctls / probe.sysctl
        if path.is_file():
            text += f", and {path} is {path.read_text().strip()}"
    return text


def run_probe(probe: Probe, *, seccomp_mode: int, sysctls: Path = Path("/proc/sys")) -> SyscallFact:
    """Make one call and say what came of it."""
    number = {"x86_64": probe.x86_64, "aarch64": probe.aarch64}.get(platform.machine(), -1)
    if number < 0:
        evidence = f"not tried: no system call numbers for {platform.machine()} here"
        return SyscallFact(name=probe.name, number=-1, verdict="absent", evidence=evidence)
    result, code = call(number, *probe.args)
    verdict = verdict_of(result, code)
    answer = errno.errorcode.get(code, str(code)) if result == -1 else str(result)
    evidence = f"{probe.shown} = {answer}{_cause(probe, verdict, seccomp_mode, sysctls)}"
    return SyscallFact(name=probe.name, number=number, verdict=verdict, evidence=evidence)


def _memfd(fact: SyscallFact) -> SyscallFact:
    """Make a memfd for real: it is what carries the weights, so reaching the call is not enough."""
    if fact.verdict != "ok":
        return fact
    try:
        descriptor = os.memfd_create("syncstack-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        evidence = f"memfd_create(CLOEXEC | ALLOW_SEALING) = {errno.errorcode.get(error.errno or 0, 'error')}"
        return msgspec.structs.replace(fact, verdict="denied", evidence=evidence)
    os.close(descriptor)
    return msgspec.structs.replace(fact, evidence="memfd_create(CLOEXEC | ALLOW_SEALING) = a descriptor")


def probe_all(*, seccomp_mode: int) -> Mapping[str, SyscallFact]:
    """Return the facts of all probes by name."""
    facts = {probe.name: run_probe(probe, seccomp_mode=seccomp_mode) for probe in PROBES}
    facts["memfd_create"] = _memfd(facts["memfd_create"])
    return facts
