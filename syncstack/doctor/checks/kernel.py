"""The filter, the kernel's own rules for reading another process, and the sandbox if there is one."""

from __future__ import annotations

from typing import Final

from syncstack.doctor import remedies, ways
from syncstack.doctor.model import Check, Finding, Remedy, broken, holds
from syncstack.doctor.needs import CONTAINER, IDENTITY
from syncstack.facts import Facts

_NOT_NEEDED: Final = "not needed: descriptors travel over the socket (SCM_RIGHTS)"
_NO_OTHER_WAY: Final = "No descriptor can be taken from another process, and there is no socket to send it over"
_RESTRICTIVE: Final = Remedy(
    compose='security_opt: ["seccomp=./seccomp/restrictive.json"]',
    kubernetes="securityContext: {seccompProfile: {type: Localhost, localhostProfile: syncstack/restrictive.json}}",
)
_CLONE3: Final = Remedy(
    other='in the profile: {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}',
    compose=_RESTRICTIVE.compose,
    kubernetes=_RESTRICTIVE.kubernetes,
)


def _filter(facts: Facts) -> Finding:
    observed = f"/proc/self/status: Seccomp {facts.seccomp_mode}, filters {facts.seccomp_filters}"
    if facts.seccomp_mode == 2:
        return holds(observed)
    return broken(observed, "Every system call of the kernel is open to this container", _RESTRICTIVE)


def _pidfd_getfd(facts: Facts) -> Finding:
    cause = ways.pidfd_cause(facts)
    fact = facts.pidfd_getfd if facts.child is None else facts.child
    if cause == "none":
        return holds(f"ok: {fact.evidence}")
    # An answer such as EBADF is none of the gate's: the call was reached, and yet it was of no use.
    word = fact.verdict if fact.verdict != "ok" else "of no use"
    observed = f"{word}: {fact.evidence}; forbidden by {remedies.CAUSES[cause]}"
    remedy = remedies.pidfd(cause, facts)
    if not ways.no_socket(facts):
        return holds(f"{observed}; {_NOT_NEEDED}", remedy)
    return broken(observed, _NO_OTHER_WAY, remedy)


def _threads(facts: Facts) -> Finding:
    fact = facts.syscalls["clone3"]
    if fact.verdict != "denied":
        return holds(fact.evidence)
    return broken(fact.evidence, "glibc takes EPERM for the answer and starts no thread at all", _CLONE3)


def _yama(facts: Facts) -> Finding:
    assert facts.identity is not None
    scope, evidence = facts.identity.yama_scope, facts.identity.yama_evidence
    if not scope:
        return holds(evidence or "this kernel has no Yama")
    remedy = remedies.yama(scope)
    observed = f"scope {scope} ({evidence})"
    if "CAP_SYS_PTRACE" in facts.capabilities.effective and scope < 3:
        return holds(f"{observed}; CAP_SYS_PTRACE is in force, which it does not bind")
    if not ways.no_socket(facts):
        return holds(f"{observed}; {_NOT_NEEDED}", remedy)
    return broken(observed, _NO_OTHER_WAY, remedy)


def _dumpable(facts: Facts) -> Finding:
    assert facts.identity is not None
    if facts.identity.dumpable:
        return holds("prctl(PR_GET_DUMPABLE) = 1")
    return broken(
        "prctl(PR_GET_DUMPABLE) is not 1: /proc/self belongs to root",
        "Not even this process's own user may read it: neither an engine by pidfd_getfd, nor py-spy, nor a debugger",
        remedies.pidfd("non-dumpable", facts),
    )


def _lsm(facts: Facts) -> Finding:
    assert facts.identity is not None
    modules, label = facts.identity.lsms or "no list of modules to be read", facts.identity.lsm_label or "none"
    observed = f"modules: {modules}; label: {label}"
    if ways.pidfd_cause(facts) != "lsm":
        return holds(observed)
    remedy = remedies.lsm(facts.identity.lsms, facts.identity.lsm_label)
    if not ways.no_socket(facts):
        return holds(f"{observed}; it forbids pidfd_getfd; {_NOT_NEEDED}", remedy)
    return broken(observed, _NO_OTHER_WAY, remedy)


def _sandbox(facts: Facts) -> Finding:
    if facts.runtime.value != "gvisor":
        return holds(f"{facts.runtime.value}: {facts.runtime.evidence}")
    return broken(
        facts.runtime.evidence,
        "The sandbox's kernel lacks the pidfd calls and parts of the GPU driver: weights are copied, not shared",
        Remedy(other="keep the sandbox if it is wanted; SYNCSTACK_TRANSPORT=auto takes a path that copies"),
    )


CHECKS: Final = (
    Check(
        id="seccomp.filter",
        assertion="a seccomp filter is in force",
        severity="warn",
        needs=(CONTAINER,),
        find=_filter,
    ),
    Check(
        id="seccomp.pidfd-getfd",
        assertion="another process's descriptors can be taken, or need not be",
        severity="warn",
        find=_pidfd_getfd,
    ),
    Check(id="seccomp.threads", assertion="the filter lets threads start", severity="fail", find=_threads),
    Check(
        id="ptrace.yama",
        assertion="Yama lets a sibling be read, or it need not be",
        severity="warn",
        needs=(IDENTITY,),
        find=_yama,
    ),
    Check(
        id="ptrace.dumpable",
        assertion="the process may be read by its own user",
        severity="warn",
        needs=(IDENTITY,),
        find=_dumpable,
    ),
    Check(
        id="ptrace.lsm",
        assertion="no security module stands between two processes of one user",
        severity="warn",
        needs=(IDENTITY,),
        find=_lsm,
    ),
    Check(id="kernel.sandbox", assertion="the kernel is Linux itself", severity="warn", find=_sandbox),
)
