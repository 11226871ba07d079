"""Needs that several transports share: the build, the host, the folder, the user, the network."""

from __future__ import annotations

from collections.abc import Callable

from syncstack.facts import Facts, FolderFact, Hello

_MOUNT = "mount one volume at SYNCSTACK_SOCKET_DIR in both"


def sides(sender: Hello, receiver: Hello) -> tuple[tuple[str, Hello], tuple[str, Hello]]:
    """Both sides with the names that the user knows them by."""
    return ("trainer", sender), ("engine", receiver)


def on(names: list[str]) -> str:
    """``the trainer``, ``the engine``, or ``the trainer and the engine``."""
    return " and ".join(f"the {name}" for name in names)


def each(sender: Hello, receiver: Hello, find: Callable[[Facts], str | None]) -> str | None:
    """What ``find`` says of either side's facts, with the side's name before it."""
    found = [(name, find(hello.facts)) for name, hello in sides(sender, receiver)]
    return "; ".join(f"the {name} {reason}" for name, reason in found if reason is not None) or None


def reached(sender: Hello, receiver: Hello, *ways: str) -> bool:
    """Whether either side has reached the other in one of ``ways``: that was tried, not inferred."""
    return bool({*sender.reachable, *receiver.reachable} & set(ways))


def in_build(transport: str) -> Callable[[Hello, Hello], str | None]:
    """The need that both builds speak ``transport``."""

    def find(sender: Hello, receiver: Hello) -> str | None:
        mute = [(name, hello) for name, hello in sides(sender, receiver) if transport not in hello.transports]
        builds = {hello.package for _, hello in mute}
        if len(builds) > 1:
            return "not in these builds: " + ", ".join(f"{name} {hello.package}" for name, hello in mute)
        return f"not in this build of {on([name for name, _ in mute])} ({builds.pop()})" if mute else None

    return find


def same_host(sender: Hello, receiver: Hello) -> str | None:
    """One kernel, by its boot id; a unix socket that was reached proves it."""
    if reached(sender, receiver, "unix"):
        return None
    ids = [(name, hello.facts.boot_id) for name, hello in sides(sender, receiver)]
    unknown = [name for name, boot in ids if not boot]
    if unknown:
        return f"trainer and engine may run on different hosts: {on(unknown)} cannot read its boot id"
    if ids[0][1] == ids[1][1]:
        return None
    shown = ", ".join(f"{name} {boot[:8]}" for name, boot in ids)
    return f"trainer and engine run on different hosts (boot ids differ: {shown})"


def sandboxed(facts: Facts) -> str | None:
    """Evidence that gVisor, and not Linux itself, answers this process; None elsewhere."""
    if facts.runtime.value == "gvisor":
        return facts.runtime.evidence
    return facts.child.evidence if facts.child is not None and facts.child.cause == "sandbox" else None


def same_sandbox(sender: Hello, receiver: Hello) -> str | None:
    """A gVisor sandbox passes no descriptors in or out; two containers of one sandbox have reached each other."""
    inside = [(name, sandboxed(hello.facts)) for name, hello in sides(sender, receiver)]
    caught = [(name, evidence) for name, evidence in inside if evidence is not None]
    if not caught or (len(caught) == 2 and reached(sender, receiver, "unix")):
        return None
    names = [name for name, _ in caught]
    verb = "runs" if len(names) == 1 else "run"
    return f"{on(names)} {verb} in a gVisor sandbox, which passes no descriptors in or out ({caught[0][1]})"


def same_user(sender: Hello, receiver: Hello) -> str | None:
    """One user to the kernel. Two user namespaces with one map have the same users."""
    us, them = sender.facts, receiver.facts
    if us.uid != them.uid:
        return (
            f"they run as different users (trainer uid {us.uid}, engine uid {them.uid}): run both as one "
            '(compose: user: "10001:10001"; Kubernetes: runAsUser)'
        )
    if same_namespace(us, them, "user"):
        return None
    maps = [facts.identity.uid_map.split() if facts.identity is not None else [] for facts in (us, them)]
    if maps[0] and maps[0] == maps[1]:
        return None
    shown = [" ".join(found) or "unknown" for found in maps]
    return f"uid {us.uid} is not the same user in both: the user namespaces map it differently ({shown[0]}; {shown[1]})"


def same_namespace(us: Facts, them: Facts, kind: str) -> bool:
    """Whether two processes of one host are in one namespace; False where either is unknown."""
    ours, theirs = us.namespaces.get(kind, ""), them.namespaces.get(kind, "")
    return bool(ours) and ours == theirs


def common_folder(sender: Hello, receiver: Hello) -> str | None:
    """One folder, by device and inode, in which both can make sockets; one that was reached needs no proof."""
    if reached(sender, receiver, "unix"):
        return None
    return same_host(sender, receiver) or _folders(sender, receiver)


def _folders(sender: Hello, receiver: Hello) -> str | None:
    lacking = each(sender, receiver, _no_folder)
    if lacking is not None:
        return f"they share no folder: {lacking}; {_MOUNT}"
    ours, theirs = sender.facts.socket_dir, receiver.facts.socket_dir
    assert ours is not None
    assert theirs is not None
    if (ours.device, ours.inode) != (theirs.device, theirs.inode):
        return f"they share no folder: {_place('trainer', ours)}, {_place('engine', theirs)}; {_MOUNT}"
    return same_user(sender, receiver)


def _no_folder(facts: Facts) -> str | None:
    folder = facts.socket_dir
    if folder is None:
        return "uses no folder (SYNCSTACK_SOCKET_DIR; an engine with `--listen unix` only)"
    if not folder.writable:
        return f"cannot use its folder ({folder.evidence})"
    return None if folder.inode else f"does not know its folder's inode ({folder.evidence})"


def _place(side: str, folder: FolderFact) -> str:
    return f"the {side}'s {folder.path} is inode {folder.device}:{folder.inode}"


def network(sender: Hello, receiver: Hello) -> str | None:
    """A way over TCP: tried, or one network namespace, or addresses of one family on both sides."""
    us, them = sender.facts, receiver.facts
    if reached(sender, receiver, "tcp") or _same_network(sender, receiver) or _families(us) & _families(them):
        return None
    shown = [", ".join(sorted(_families(facts))) or "none" for facts in (us, them)]
    return f"no network that both are on: usable address families of the trainer: {shown[0]}; of the engine: {shown[1]}"


def link_by_tcp(sender: Hello, receiver: Hello) -> str | None:
    """A group is made of the addresses at which its members' links end; a unix socket has none."""
    if reached(sender, receiver, "unix") and not reached(sender, receiver, "tcp"):
        return "the trainer reaches the engine by a unix socket, over which stream moves the same bytes"
    return None


def _same_network(sender: Hello, receiver: Hello) -> bool:
    """Whether both are in one network namespace, and so on one loopback."""
    return same_host(sender, receiver) is None and same_namespace(sender.facts, receiver.facts, "net")


def _families(facts: Facts) -> set[str]:
    """Address families by which others could reach this process; loopback and link-local addresses do not count."""
    usable = [interface for interface in facts.network.interfaces if interface.up and not interface.loopback]
    four = any(not ip.startswith("169.254.") for interface in usable for ip in interface.ipv4)
    six = any(not ip.lower().startswith("fe80:") for interface in usable for ip in interface.ipv6)
    return {name for name, found in (("IPv4", four), ("IPv6", six)) if found}


def memfd(sender: Hello, _receiver: Hello) -> str | None:
    """The trainer holds the weights in a memfd: it must be made and filled; the engine only maps it."""
    fact = sender.facts.syscalls.get("memfd_create")
    if fact is None or fact.verdict != "ok":
        return f"the trainer cannot make a memfd ({'it was not tried' if fact is None else fact.evidence})"
    reserve = sender.facts.memory.memfd_reserve
    if reserve is not None and reserve.verdict != "ok":
        return f"the trainer cannot reserve memory in a memfd ({reserve.evidence})"
    return None
