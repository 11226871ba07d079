"""The checks, in the order in which they are shown. ``docs/doctor.md`` has a section for each id."""

from __future__ import annotations

from typing import Final

from syncstack.doctor.model import Check, Finding
from syncstack.facts import Facts

_MIB: Final = 1 << 20
# What Docker gives a container by default; vLLM's and torch's own worker queues live there, our weights do not.
_SHM_BYTES: Final = 64 * _MIB
_MEMLOCK_BYTES: Final = 64 * _MIB
_NOFILE: Final = 1024

_OUTSIDE: Final = Finding(holds=None, observed="not in a container")


def _filter(facts: Facts) -> Finding:
    if not facts.in_container:
        return _OUTSIDE
    return Finding(
        holds=facts.seccomp_mode == 2,
        observed=f"/proc/self/status: Seccomp {facts.seccomp_mode}, filters {facts.seccomp_filters}",
        consequence="Every system call of the kernel is open to this container",
        remedy='compose: security_opt: ["seccomp=./seccomp/restrictive.json"]; '
        "Kubernetes: seccompProfile: {type: Localhost, localhostProfile: syncstack/restrictive.json}",
    )


def _pidfd_getfd(facts: Facts) -> Finding:
    fact = facts.pidfd_getfd
    needless = "not needed: descriptors travel over the socket (SCM_RIGHTS)"
    return Finding(holds=True, observed=f"{fact.verdict}: {fact.evidence}; {needless}")


def _threads(facts: Facts) -> Finding:
    fact = facts.syscalls["clone3"]
    return Finding(
        holds=fact.verdict != "denied",
        observed=fact.evidence,
        consequence="glibc takes EPERM for the answer and starts no thread at all",
        remedy='in the profile: {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}',
    )


def _memfd(facts: Facts) -> Finding:
    fact = facts.syscalls["memfd_create"]
    return Finding(
        holds=fact.verdict == "ok",
        observed=fact.evidence,
        consequence="The zero-copy host transport cannot hold the weights",
        remedy="use seccomp/restrictive.json or permissive.json, or allow memfd_create in your profile",
    )


def _socket_dir(facts: Facts) -> Finding:
    folder = facts.socket_dir
    if folder is None:
        return Finding(holds=None, observed="no socket folder given")
    return Finding(
        holds=folder.writable,
        observed=folder.evidence,
        consequence="Trainer and engine cannot meet",
        remedy=f"mount one volume, owned by uid {facts.uid}, at {folder.path} in trainer and engine "
        f'(compose: volumes: ["sockets:{folder.path}"]), or set SYNCSTACK_SOCKET_DIR',
    )


def _socket_shared(facts: Facts) -> Finding:
    folder = facts.socket_dir
    if not facts.in_container:
        return _OUTSIDE
    if folder is None or not folder.exists:
        return Finding(holds=None, observed="no socket folder to look at")
    return Finding(
        holds=folder.mounted,
        observed=folder.evidence,
        consequence="No other container can see a socket in this folder",
        remedy=f'compose: volumes: ["sockets:{folder.path}"] in both services; '
        f"Kubernetes: one emptyDir mounted at {folder.path} in both containers",
    )


def _shm(facts: Facts) -> Finding:
    size = facts.memory.shm_bytes
    if size is None:
        return Finding(holds=None, observed=facts.memory.evidence)
    return Finding(
        holds=size >= _SHM_BYTES,
        observed=f"/dev/shm: {size / _MIB:.0f} MiB",  # noqa: S108 - text
        consequence="The engine's own worker processes may fail with a bus error; our weights do not go there",
        remedy="compose: shm_size: 256m; Kubernetes: an emptyDir {medium: Memory} at /dev/shm",
    )


def _memlock(facts: Facts) -> Finding:
    soft = facts.memory.memlock_soft_bytes
    shown = "unlimited" if soft is None else f"{soft / _MIB:.0f} MiB"
    if facts.gpu.count == 0:
        return Finding(holds=None, observed=f"soft limit {shown}; no GPU here, so nothing is pinned")
    return Finding(
        holds=soft is None or soft >= _MEMLOCK_BYTES,
        observed=f"soft limit {shown}",
        consequence="NCCL over InfiniBand cannot register its buffers",
        remedy="compose: ulimits: {memlock: -1}",
    )


def _nofile(facts: Facts) -> Finding:
    soft = facts.memory.nofile_soft
    return Finding(
        holds=soft is None or soft >= _NOFILE,
        observed=f"soft limit {'unlimited' if soft is None else soft}",
        consequence="GPU memory of a large model is passed as several hundred descriptors",
        remedy=f"compose: ulimits: {{nofile: {_NOFILE * 16}}}",
    )


def _no_new_privs(facts: Facts) -> Finding:
    if not facts.in_container:
        return _OUTSIDE
    return Finding(
        holds=facts.no_new_privs,
        observed=f"/proc/self/status: NoNewPrivs {int(facts.no_new_privs)}",
        consequence="A setuid program in the image could raise privileges",
        remedy='compose: security_opt: ["no-new-privileges:true"]; Kubernetes: allowPrivilegeEscalation: false',
    )


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def _capabilities(facts: Facts) -> Finding:
    if not facts.in_container:
        return _OUTSIDE
    effective, bounding = facts.capabilities.effective, facts.capabilities.bounding
    return Finding(
        holds=not effective and not bounding,
        observed=f"effective: {_some(effective)}; bounding: {_some(bounding)}",
        consequence="Nothing here needs a capability",
        remedy='compose: cap_drop: [ALL]; Kubernetes: capabilities: {drop: ["ALL"]}',
    )


def _user(facts: Facts) -> Finding:
    if not facts.in_container:
        return _OUTSIDE
    return Finding(
        holds=facts.uid != 0,
        observed=f"uid {facts.uid}, gid {facts.gid}",
        consequence="root in the container is root on the host wherever a file or a kernel bug leads out",
        remedy='compose: user: "10001:10001"; Kubernetes: runAsUser: 10001, runAsNonRoot: true',
    )


def _gpu(facts: Facts) -> Finding:
    return Finding(holds=True, observed=f"{facts.gpu.count or 'none'}: {facts.gpu.evidence}")


CHECKS: Final = (
    Check(id="seccomp.filter", assertion="a seccomp filter is in force", severity="warn", find=_filter),
    Check(
        id="seccomp.pidfd-getfd",
        assertion="weights reach the engine whatever pidfd_getfd says",
        severity="warn",
        find=_pidfd_getfd,
    ),
    Check(id="seccomp.threads", assertion="the filter lets threads start", severity="fail", find=_threads),
    Check(id="memory.memfd", assertion="a memfd can be made", severity="fail", find=_memfd),
    Check(id="socket.dir", assertion="sockets can be made in the socket folder", severity="fail", find=_socket_dir),
    Check(
        id="socket.shared",
        assertion="the socket folder is a mount that other containers can share",
        severity="warn",
        find=_socket_shared,
    ),
    Check(id="memory.shm", assertion="/dev/shm has at least 64 MiB", severity="warn", find=_shm),  # noqa: S108 - text
    Check(id="limits.nofile", assertion="1024 descriptors can be open", severity="warn", find=_nofile),
    Check(id="limits.memlock", assertion="64 MiB can be locked in memory", severity="warn", find=_memlock),
    Check(id="privileges.user", assertion="the user is not root", severity="warn", find=_user),
    Check(id="privileges.no-new-privs", assertion="no_new_privs is set", severity="warn", find=_no_new_privs),
    Check(id="privileges.capabilities", assertion="there are no capabilities", severity="warn", find=_capabilities),
    Check(id="gpu.devices", assertion="the GPUs are counted", severity="warn", find=_gpu),
)
