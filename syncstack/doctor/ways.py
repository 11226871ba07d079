"""How a descriptor, and with it the memory that holds the weights, can get from this process to an engine."""

from __future__ import annotations

from syncstack.facts import Cause, Facts


def no_socket(facts: Facts) -> str:
    """Return why no descriptor can be sent over a unix socket (SCM_RIGHTS), "" if one can."""
    folder = facts.socket_dir
    if folder is None:
        return "no socket folder"
    if not folder.writable:
        return f"no unix socket can be made in {folder.path}" if folder.exists else folder.evidence
    if facts.in_container and not folder.mounted:
        return f"{folder.path} is not shared with any other container"
    return ""


def _has_pidfd_getfd(release: str) -> bool:
    """Return whether a kernel of this release has the call: 5.6 or newer, or a name that says nothing."""
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    return not (major.isdigit() and minor.isdigit()) or (int(major), int(minor)) >= (5, 6)


def pidfd_cause(facts: Facts) -> Cause:
    """Return what forbids pidfd_getfd here, ``none`` if nothing does; from a real target where one was tried."""
    if facts.child is not None:
        return facts.child.cause
    fact = facts.pidfd_getfd
    if fact.verdict == "ok":
        return "none"
    if facts.runtime.value == "gvisor":
        return "sandbox"
    if fact.verdict == "absent" and not _has_pidfd_getfd(facts.kernel):
        return "old-kernel"
    return "seccomp" if facts.seccomp_mode == 2 else "unknown"


def no_pidfd(facts: Facts) -> str:
    """Return, in few words, why a sibling's descriptors cannot be taken by pidfd_getfd; "" if they can."""
    cause = pidfd_cause(facts)
    if cause != "none":
        return f"no pidfd_getfd: {cause}"
    scope = None if facts.identity is None else facts.identity.yama_scope
    # Scope 1 lets a process at its children, which is what was tried, but an engine is a sibling.
    if scope and (scope >= 3 or "CAP_SYS_PTRACE" not in facts.capabilities.effective):
        return f"no pidfd_getfd: Yama's scope {scope}"
    return ""


def host_transport(facts: Facts) -> tuple[bool, str]:
    """Return whether a memfd can be made here and handed to a sibling; how, if not by a socket, or why not."""
    memfd = facts.syscalls["memfd_create"]
    if memfd.verdict != "ok":
        return False, memfd.evidence
    socket = no_socket(facts)
    if not socket:
        return True, ""
    pidfd = no_pidfd(facts)
    if not pidfd:
        return True, f"by pidfd_getfd only, to an engine in the same PID namespace: {socket}"
    return False, f"{socket}; {pidfd}"
