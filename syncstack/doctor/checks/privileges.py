"""Who the process is, and what it could do that nothing here needs."""

from __future__ import annotations

from typing import Final

from syncstack.doctor.model import Check, Finding, Remedy, broken, holds
from syncstack.doctor.needs import CONTAINER, IDENTITY
from syncstack.facts import Facts


def outside_id(inside: int, id_map: str) -> int | None:
    """Return what ``inside`` is outside of the user namespace, None if the map does not name it.

    ``id_map`` is the text of /proc/self/uid_map: first id inside, first id outside, how many, one extent a line.
    """
    for line in id_map.splitlines():
        first, outside, count = (int(field) for field in line.split())
        if first <= inside < first + count:
            return outside + inside - first
    return None


def _user(facts: Facts) -> Finding:
    observed = f"uid {facts.uid}, gid {facts.gid}"
    if facts.uid != 0:
        return holds(observed)
    identity = facts.identity
    if identity is not None and identity.remapped and (outside := outside_id(0, identity.uid_map)):
        return holds(f"{observed}, which is uid {outside} on the host")
    return broken(
        observed,
        "root in the container is root on the host wherever a file or a kernel bug leads out",
        Remedy(compose='user: "10001:10001"', kubernetes="securityContext: {runAsUser: 10001, runAsNonRoot: true}"),
    )


def _namespace(facts: Facts) -> Finding:
    identity = facts.identity
    assert identity is not None
    if not identity.remapped:
        return holds("ids are the host's")
    outside = outside_id(facts.uid, identity.uid_map)
    extents = ", ".join(" ".join(line.split()) for line in identity.uid_map.splitlines())
    if outside is not None:
        return holds(
            f"a rootless or remapped engine: uid {facts.uid} is {outside} outside (uid_map: {extents}); "
            "host namespaces are out of reach and not needed"
        )
    return broken(
        f"uid {facts.uid} is not in uid_map ({extents})",
        "The process owns no file that it makes, and no socket of its own can be told from a stranger's",
        Remedy(
            other="on the node, a range of 65536 ids for the engine's user in /etc/subuid and /etc/subgid",
            compose='user: "10001:10001"',
            kubernetes="securityContext: {runAsUser: 10001, runAsGroup: 10001}",
        ),
    )


def _no_new_privs(facts: Facts) -> Finding:
    observed = f"/proc/self/status: NoNewPrivs {int(facts.no_new_privs)}"
    if facts.no_new_privs:
        return holds(observed)
    return broken(
        observed,
        "A setuid program in the image could raise privileges",
        Remedy(
            compose='security_opt: ["no-new-privileges:true"]',
            kubernetes="securityContext: {allowPrivilegeEscalation: false}",
        ),
    )


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def _capabilities(facts: Facts) -> Finding:
    effective, bounding = facts.capabilities.effective, facts.capabilities.bounding
    observed = f"effective: {_some(effective)}; bounding: {_some(bounding)}"
    if not effective and not bounding:
        return holds(observed)
    return broken(
        observed,
        "Nothing here needs a capability",
        Remedy(compose="cap_drop: [ALL]", kubernetes='securityContext: {capabilities: {drop: ["ALL"]}}'),
    )


CHECKS: Final = (
    Check(id="privileges.user", assertion="the user is not root", severity="warn", needs=(CONTAINER,), find=_user),
    Check(
        id="privileges.user-namespace",
        assertion="the user has an id outside of its user namespace",
        severity="warn",
        needs=(IDENTITY,),
        find=_namespace,
    ),
    Check(
        id="privileges.no-new-privs",
        assertion="no_new_privs is set",
        severity="warn",
        needs=(CONTAINER,),
        find=_no_new_privs,
    ),
    Check(
        id="privileges.capabilities",
        assertion="there are no capabilities",
        severity="warn",
        needs=(CONTAINER,),
        find=_capabilities,
    ),
)
