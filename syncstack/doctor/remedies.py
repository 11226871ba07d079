"""What to change, by cause: the least that helps. Nothing here opens a container to more than the one call.

Never a host namespace, which a rootless or remapped engine could not give anyway, and never CAP_SYS_PTRACE, which a
pod under the baseline standard may not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from syncstack.doctor.model import Remedy
from syncstack.facts import Cause, Facts

SHARE_FOLDER: Final = Remedy(
    compose='volumes: ["sockets:/run/syncstack"] in both services',
    kubernetes="one emptyDir: {medium: Memory}, mounted at /run/syncstack in both containers",
)
SAME_USER: Final = Remedy(
    compose='user: "10001:10001" in both services',
    kubernetes="securityContext: {runAsUser: 10001, runAsGroup: 10001, runAsNonRoot: true} in both containers",
)
NO_CAPABILITIES: Final = Remedy(
    compose="cap_drop: [ALL] in both services",
    kubernetes='securityContext: {capabilities: {drop: ["ALL"]}} in both containers',
)

# Why a process may not take another's descriptors, in words that follow "forbidden by" or stand alone.
CAUSES: Final[Mapping[Cause, str]] = {
    "seccomp": "the seccomp filter",
    "sandbox": "a sandbox whose kernel has no such call",
    "old-kernel": "a kernel without the call",
    "yama": "Yama's ptrace scope, not by a filter",
    "uid": "the ptrace rule, not by a filter: the other process has another uid or gid",
    "non-dumpable": "the ptrace rule, not by a filter: the other process is not dumpable",
    "capability": "the ptrace rule, not by a filter: the other process has a capability that this one lacks",
    "user-namespace": "the ptrace rule, not by a filter: the other process is in another user namespace",
    "pid-namespace": "a PID namespace of its own: the number names nobody here, or somebody else",
    "lsm": "a security module's profile, not by a filter",
    "target-gone": "nothing: the other process had ended",
    "bad-descriptor": "nothing: the number is no open descriptor there, which is no matter of permission",
    "unknown": "something that could not be told",
}

_PIDFD: Final[Mapping[Cause, Remedy]] = {
    "seccomp": Remedy(
        compose='security_opt: ["seccomp=./seccomp/permissive.json"]',
        kubernetes="securityContext: {seccompProfile: {type: Localhost, localhostProfile: syncstack/permissive.json}}",
    ),
    "sandbox": Remedy(other="none inside the sandbox: let descriptors go over a socket in a folder that both mount"),
    "old-kernel": Remedy(other="a node with kernel 5.6 or newer"),
    "uid": SAME_USER,
    "non-dumpable": Remedy(
        other="start the program as its final user, from a file that this user may read, and let nothing in it call "
        "prctl(PR_SET_DUMPABLE, 0)",
        compose='user: "10001:10001", instead of a change of user inside',
        kubernetes="securityContext: {runAsUser: 10001, runAsGroup: 10001}, instead of a change of user inside",
    ),
    "capability": NO_CAPABILITIES,
    "user-namespace": Remedy(
        compose="the same userns_mode, or none, in both services",
        kubernetes="both containers in one pod: they then share its user namespace (hostUsers: false stays)",
    ),
    "pid-namespace": Remedy(compose='pid: "service:trainer" in the engine', kubernetes="shareProcessNamespace: true"),
    "target-gone": Remedy(other="start the other process again and repeat"),
    "bad-descriptor": Remedy(other="the same syncstack release on both sides; no permission is missing"),
    "unknown": Remedy(other="file an issue with the output of: syncstack doctor -v -o markdown"),
}

# For both sides: the trainer holds the descriptors, the engine takes them.
_YAMA: Final[Mapping[int, Remedy]] = {
    1: Remedy(
        other="a process may be read by its parents only, until it names one that may too: trainer: "
        "prctl(PR_SET_PTRACER, process of the engine's worker); engine: nothing to change"
    ),
    2: Remedy(
        other="only a process with CAP_SYS_PTRACE may read another; do not add it: trainer and engine: share a folder, "
        "so that descriptors go over a socket"
    ),
    3: Remedy(
        other="nobody may read another process until the node restarts: trainer and engine: share a folder, so that "
        "descriptors go over a socket"
    ),
}


def yama(scope: int) -> Remedy:
    """Return the advice for a Yama scope of 1, 2 or 3."""
    step = _YAMA.get(scope, _YAMA[3])
    return step if scope == 1 else Remedy(other=step.other, **_lines(SHARE_FOLDER))


def lsm(lsms: str, label: str) -> Remedy:
    """Return how to put both containers under one profile of the security module that is in force.

    A container cannot always read the list; SELinux's labels have four parts, AppArmor's are ``profile (mode)``.
    """
    if "selinux" in lsms.split(",") or label.count(":") >= 3:
        return Remedy(
            compose='security_opt: ["label=level:s0:c100,c200"] in both services',
            kubernetes='securityContext: {seLinuxOptions: {level: "s0:c100,c200"}} in both containers',
        )
    return Remedy(
        compose='security_opt: ["apparmor=docker-default"] in both services',
        kubernetes="securityContext: {appArmorProfile: {type: RuntimeDefault}} in both containers",
    )


def pidfd(cause: Cause, facts: Facts) -> Remedy:
    """Return the least that lets pidfd_getfd through where ``cause`` forbids it."""
    identity = facts.identity
    if cause == "yama":
        return yama(3 if identity is None or identity.yama_scope is None else identity.yama_scope)
    if cause == "lsm":
        return lsm("", "") if identity is None else lsm(identity.lsms, identity.lsm_label)
    return _PIDFD.get(cause, Remedy())


def _lines(remedy: Remedy) -> dict[str, str]:
    return {"compose": remedy.compose, "kubernetes": remedy.kubernetes}
