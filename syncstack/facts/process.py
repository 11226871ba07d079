"""What /proc says about this process: filter, capabilities, namespaces, runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from syncstack.facts.model import Capabilities, Guess

# In the kernel's order (bit 0 first); a bit past the end is shown by its number.
_CAPABILITIES: Final = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
    NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
    SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
    MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"""
CAPABILITY_NAMES: Final = tuple(f"CAP_{name}" for name in _CAPABILITIES.split())
_NAMESPACES: Final = ("pid", "ipc", "net", "mnt", "user", "uts")


def read_text(path: Path) -> str:
    """Return a file's text without the end of line, or "" where it cannot be read (another kernel, a sandbox)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def status(proc: Path = Path("/proc"), pid: int | str = "self") -> Mapping[str, str]:
    """Return /proc/PID/status as key and value; empty where there is no such process to be seen."""
    lines = read_text(proc / str(pid) / "status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def life(pid: int | str = "self") -> tuple[str, int] | None:
    """Return (state letter, start in clock ticks since boot) of a process; None without such a process.

    Fields 3 and 22 of /proc/PID/stat. The second tells a process from a later one with the same number.
    """
    # The name before the fields may hold spaces and brackets.
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if len(fields) > 19 else None


def boot_id() -> str:
    """Return the id that all processes of one running machine share, "" where it cannot be read."""
    return read_text(Path("/proc/sys/kernel/random/boot_id"))


def capability_names(mask: int) -> tuple[str, ...]:
    """Return the names of the bits in ``mask``."""
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return tuple(CAPABILITY_NAMES[bit] if bit < len(CAPABILITY_NAMES) else f"CAP_{bit}" for bit in bits)


def capabilities(fields: Mapping[str, str]) -> Capabilities:
    """Return the five sets out of /proc/self/status; a missing line is an empty set."""
    sets = {key: capability_names(int(fields.get(key, "0"), 16)) for key in ("CapEff", "CapPrm", "CapInh", "CapBnd")}
    return Capabilities(
        effective=sets["CapEff"],
        permitted=sets["CapPrm"],
        inheritable=sets["CapInh"],
        bounding=sets["CapBnd"],
        ambient=capability_names(int(fields.get("CapAmb", "0"), 16)),
    )


def bounding_capabilities() -> tuple[str, ...]:
    """Return this process's bounding set, the one by which Docker resolves a profile's conditions."""
    return capabilities(status()).bounding


def namespaces(proc: Path = Path("/proc")) -> dict[str, str]:
    """Return the inode of each namespace by kind; "" where the link cannot be read."""
    found = {}
    for kind in _NAMESPACES:
        try:
            found[kind] = str((proc / "self/ns" / kind).readlink()).partition("[")[2].rstrip("]")
        except OSError:
            found[kind] = ""
    return found


def runtime(root: Path = Path("/")) -> Guess:
    """Guess what runs this process; the marks are files that each runtime leaves in its containers."""
    cgroup = read_text(root / "proc/self/cgroup")
    mounts = read_text(root / "proc/self/mountinfo")
    root_mount = next((line for line in mounts.splitlines() if " / " in line), "")
    candidates = (
        ("gvisor", "gVisor" in read_text(root / "proc/version"), "/proc/version names gVisor"),
        ("podman", (root / "run/.containerenv").exists(), "/run/.containerenv exists"),
        ("docker", (root / ".dockerenv").exists(), "/.dockerenv exists"),
        ("kubernetes", (root / "var/run/secrets/kubernetes.io").exists(), "/var/run/secrets/kubernetes.io exists"),
        ("kubernetes", "kubepods" in cgroup, "/proc/self/cgroup names kubepods"),
        ("docker", "/docker/" in root_mount, "the root mount lies in a docker folder"),
        ("containerd", "io.containerd." in root_mount, "the root mount lies in a containerd folder"),
    )
    for value, found, evidence in candidates:
        if found:
            return Guess(value=value, evidence=evidence)
    return Guess(value="none", evidence="no mark of a container runtime")
