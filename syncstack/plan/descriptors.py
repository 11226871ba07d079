"""How a descriptor gets from the trainer to the engine: over a unix socket, or fetched with pidfd_getfd.

The socket is preferred: it needs no system call that containers deny, no shared PID namespace and no ptrace right.
The needs of pidfd_getfd follow the kernel's order: filter, call, process number, then ``ptrace_may_access``.
"""

from __future__ import annotations

from syncstack.facts import Cause, Facts, Hello, SyscallFact
from syncstack.plan.model import FdWay, Need, Unmet
from syncstack.plan.needs import (
    common_folder,
    network,
    reached,
    same_namespace,
    same_sandbox,
    sandboxed,
)

_SYS_PTRACE = "CAP_SYS_PTRACE"

ADVICE: dict[Cause, str] = {
    "none": "",
    "seccomp": "start the engine under seccomp/permissive.json",
    "sandbox": "choose a path that copies: stream, or disk",
    "old-kernel": "pidfd_getfd came with Linux 5.6",
    "yama": "see kernel.yama.ptrace_scope",
    "uid": 'run both as one user and group (compose: user: "10001:10001"; Kubernetes: runAsUser, runAsGroup)',
    "non-dumpable": "the trainer hides from its peers: it set PR_SET_DUMPABLE to 0, changed its user, or its program "
    "file cannot be read; no capability is needed to undo that",
    "capability": "drop the capabilities of the trainer (compose: cap_drop: [ALL]; Kubernetes: "
    'capabilities: {drop: ["ALL"]})',
    "user-namespace": "the ids of one mean nothing in the other",
    "pid-namespace": 'let the two containers share one (compose, in the engine: pid: "service:trainer"; Kubernetes: '
    "shareProcessNamespace: true)",
    "lsm": "run both under one AppArmor profile, or with one SELinux level",
    "target-gone": "the process that was asked had ended: ask again",
    "bad-descriptor": "the call is allowed; the descriptor's number was wrong",
    "unknown": "run `syncstack doctor` in the engine",
}
"""For each cause, the least that helps. A shared folder helps against all of them."""

YAMA: dict[int, str] = {
    1: "only a process that the trainer names may look into it: let the trainer call prctl(PR_SET_PTRACER)",
    2: "only CAP_SYS_PTRACE may, in the engine as in any other process; it is the node's setting",
    3: "nobody may until the node starts anew, whatever the trainer or the engine is given",
}
"""What each kernel.yama.ptrace_scope means for two siblings."""


def _because(what: str, evidence: str, cause: Cause, advice: str = "") -> str:
    return f"{what} ({evidence}): {advice or ADVICE[cause]}"


def _pid_namespace(sender: Hello, receiver: Hello) -> str | None:
    us, them = sender.facts, receiver.facts
    if same_namespace(us, them, "pid"):
        return None
    shown = " and ".join(facts.namespaces.get("pid", "") or "unknown" for facts in (us, them))
    what = "the engine cannot name the trainer's process: they are in different PID namespaces"
    return _because(what, shown, "pid-namespace")


def _calls(_sender: Hello, receiver: Hello) -> str | None:
    for name in ("pidfd_getfd", "pidfd_open"):
        fact = receiver.facts.syscalls.get(name)
        if fact is None:
            return f"whether the engine may call {name} was not asked"
        if fact.verdict == "denied":
            return _because(f"the engine may not call {name}", fact.evidence, "seccomp")
        if fact.verdict == "absent":
            return _because(f"the engine has no {name}", fact.evidence, _absent(receiver.facts, fact))
    return None


def _absent(facts: Facts, fact: SyscallFact) -> Cause:
    """ENOSYS means "not there": of a sandbox, of an old kernel, or of a filter that says so."""
    if sandboxed(facts) is not None:
        return "sandbox"
    release = facts.kernel.split(".")
    numbers = [int(part) for part in release[:2] if part.isdigit()]
    old = len(numbers) == 2 and tuple(numbers) < ((5, 3) if fact.name == "pidfd_open" else (5, 6))
    return "old-kernel" if old else "seccomp"


def _child(_sender: Hello, receiver: Hello) -> str | None:
    """The engine's trial with a child of its own: what fails there fails with a stranger too."""
    child = receiver.facts.child
    if child is None:
        return "whether the engine can fetch descriptors was not tried with a child of its own"
    if child.verdict == "ok":
        return None
    scope = receiver.facts.identity.yama_scope if receiver.facts.identity is not None else None
    advice = YAMA.get(scope or 0, "") if child.cause == "yama" else ""
    what = f"the engine cannot even fetch a descriptor of its own child, because of {child.cause}"
    return _because(what, child.evidence, child.cause, advice)


def _identity_known(sender: Hello, receiver: Hello) -> str | None:
    unknown = [name for name, hello in (("trainer", sender), ("engine", receiver)) if hello.facts.identity is None]
    return f"who the {unknown[0]} is to the kernel's permission checks was not asked" if unknown else None


def _user_namespace(sender: Hello, receiver: Hello) -> str | None:
    us, them = sender.facts, receiver.facts
    if same_namespace(us, them, "user"):
        return None
    shown = " and ".join(facts.namespaces.get("user", "") or "unknown" for facts in (us, them))
    return _because("trainer and engine are in different user namespaces", shown, "user-namespace")


def _may_trace(hello: Hello) -> bool:
    """Whether the process may look into any process of its user namespace, whatever that one's user."""
    return _SYS_PTRACE in hello.facts.capabilities.effective


def _ids(sender: Hello, receiver: Hello) -> str | None:
    us, them = sender.facts, receiver.facts
    euid = us.identity.euid if us.identity is not None else us.uid
    if _may_trace(receiver) or (us.uid == euid == them.uid and us.gid == them.gid):
        return None
    shown = f"trainer {us.uid}:{us.gid}, effective {euid}; engine {them.uid}:{them.gid}"
    return _because("trainer and engine run as different users", shown, "uid")


def _dumpable(sender: Hello, receiver: Hello) -> str | None:
    identity = sender.facts.identity
    if identity is None or identity.dumpable or _may_trace(receiver):
        return None
    return _because("the kernel lets nobody look into the trainer", "PR_GET_DUMPABLE is not 1", "non-dumpable")


def _capabilities(sender: Hello, receiver: Hello) -> str | None:
    ours, theirs = sender.facts.capabilities.permitted, receiver.facts.capabilities.permitted
    more = [name for name in ours if name not in theirs]
    if not more or _may_trace(receiver):
        return None
    shown = ", ".join(more[:3]) + (f" and {len(more) - 3} more" if len(more) > 3 else "")
    return _because("the trainer has capabilities that the engine lacks", shown, "capability")


def _yama(sender: Hello, receiver: Hello) -> str | None:
    """One setting for the whole node; a side that could not read it does not soften what the other one read."""
    identities = [hello.facts.identity for hello in (sender, receiver) if hello.facts.identity is not None]
    worst = max(identities, key=lambda identity: identity.yama_scope or 0, default=None)
    scope = (worst.yama_scope or 0) if worst is not None else 0
    if worst is None or scope == 0 or (scope < 3 and _may_trace(receiver)):
        return None
    what = "Yama keeps the engine out of the trainer"
    return _because(what, worst.yama_evidence or f"ptrace_scope {scope}", "yama", YAMA.get(scope, YAMA[3]))


def _label(facts: Facts) -> str:
    return facts.identity.lsm_label if facts.identity is not None else ""


def _lsm(sender: Hello, receiver: Hello) -> str | None:
    ours, theirs = _label(sender.facts), _label(receiver.facts)
    if ours == theirs:
        return None
    shown = f"trainer {ours or 'none'}, engine {theirs or 'none'}"
    return _because("trainer and engine have different security labels", shown, "lsm")


def _talk(sender: Hello, receiver: Hello) -> str | None:
    """The engine must be told the process and the descriptor's number."""
    if reached(sender, receiver, "unix"):
        return None
    lack = network(sender, receiver)
    return f"the trainer has no way to tell the engine which descriptor to fetch: {lack}" if lack else None


# On one host, which whoever wants a descriptor needs anyway.
PIDFD: tuple[Need, ...] = (
    Need("one side of a sandbox", same_sandbox),
    Need("one PID namespace", _pid_namespace),
    Need("pidfd_open and pidfd_getfd in the engine", _calls),
    Need("a descriptor of its own child in the engine", _child),
    Need("known identities", _identity_known),
    Need("one user namespace", _user_namespace),
    Need("one user", _ids),
    Need("a dumpable trainer", _dumpable),
    Need("no capability of the trainer's beyond the engine's", _capabilities),
    Need("Yama's consent", _yama),
    Need("one security label", _lsm),
    Need("a way to talk", _talk),
)

SCM: tuple[Need, ...] = (Need("one side of a sandbox", same_sandbox), Need("a unix socket", common_folder))


def unmet(needs: tuple[Need, ...], sender: Hello, receiver: Hello) -> tuple[Unmet, ...]:
    """Those of ``needs`` that the link does not meet, in order."""
    found = ((need, need.find(sender, receiver)) for need in needs)
    return tuple(
        Unmet(need=need.name, reason=reason, hardware=need.hardware) for need, reason in found if reason is not None
    )


def way(sender: Hello, receiver: Hello) -> FdWay:
    """How descriptors travel over this link; "" if they cannot."""
    if not unmet(SCM, sender, receiver):
        return "scm"
    return "" if unmet(PIDFD, sender, receiver) else "pidfd"


def no_way(sender: Hello, receiver: Hello) -> str | None:
    """Why no descriptor can be handed over; None where there is a way."""
    if way(sender, receiver):
        return None
    scm, pidfd = unmet(SCM, sender, receiver)[0].reason, unmet(PIDFD, sender, receiver)[0].reason
    if scm == pidfd:
        return scm
    return f"no descriptor can be handed over. By a unix socket: {scm}. By pidfd_getfd: {pidfd}"


def more_gates(sender: Hello, receiver: Hello) -> tuple[Unmet, ...]:
    """What else stands before pidfd_getfd, after the first thing that ``no_way`` tells."""
    rest = unmet(PIDFD, sender, receiver)[1:]
    return tuple(Unmet(need=f"for pidfd_getfd, {lack.need}", reason=lack.reason) for lack in rest)
