"""Where trainer and engine meet: the folder of the sockets, and the network."""

from __future__ import annotations

from typing import Final

from syncstack.doctor import ways
from syncstack.doctor.model import Check, Finding, Remedy, broken, holds
from syncstack.doctor.needs import CONTAINER, FOLDER, NETWORK, USABLE_FOLDER
from syncstack.facts import Facts

# An engine listens on one port for control and one for each worker.
_PORTS: Final = 64


def _dir(facts: Facts) -> Finding:
    folder = facts.socket_dir
    assert folder is not None
    if folder.writable:
        return holds(folder.evidence)
    remedy = Remedy(
        other=f"one volume, owned by uid {facts.uid}, mounted in trainer and engine, or SYNCSTACK_SOCKET_DIR set to it",
        compose=f'volumes: ["sockets:{folder.path}"] in both services',
        kubernetes=f"one emptyDir: {{medium: Memory}}, mounted at {folder.path} in both containers",
    )
    if ways.no_pidfd(facts):
        return broken(folder.evidence, "Trainer and engine cannot meet", remedy)
    consequence = "Trainer and engine can meet only if they share a PID namespace, by pidfd_getfd"
    return broken(folder.evidence, consequence, remedy, severity="warn")


def _shared(facts: Facts) -> Finding:
    folder = facts.socket_dir
    assert folder is not None
    if folder.mounted:
        return holds(folder.evidence)
    return broken(
        folder.evidence,
        "No other container can see a socket in this folder",
        Remedy(
            compose=f'volumes: ["sockets:{folder.path}"] in both services',
            kubernetes=f"one emptyDir: {{medium: Memory}}, mounted at {folder.path} in both containers",
        ),
    )


def _interfaces(facts: Facts) -> Finding:
    up = [one for one in facts.network.interfaces if one.up and not one.loopback]
    if up:
        four = any(not address.startswith("169.254.") for one in up for address in one.ipv4)
        six = any(not address.lower().startswith("fe80:") for one in up for address in one.ipv6)
        families = " and ".join(name for name, has in (("IPv4", four), ("IPv6", six)) if has)
        return holds(f"{', '.join(one.name for one in up)}; addresses: {families or 'link-local only'}")
    observed = "no interface is up but loopback"
    if ways.host_transport(facts)[0]:
        return holds(f"{observed}; not needed on one host")
    return broken(
        observed,
        "Neither the host's memory nor a network leads to an engine",
        Remedy(
            other="a shared socket folder is enough on one host",
            compose="networks: [default] in both services, instead of network_mode: none",
            kubernetes="a cluster network: a pod without one has only its own containers to talk to",
        ),
    )


def _ports(facts: Facts) -> Finding:
    low, high = facts.network.ephemeral_low, facts.network.ephemeral_high
    start = facts.network.unprivileged_port_start
    observed = f"outgoing connections take {low}-{high}, users may listen from {start}"
    if low - start >= _PORTS or high < 65535 - _PORTS:
        return holds(observed)
    if not ways.no_socket(facts):
        return holds(f"{observed}; not needed: trainer and engine meet in the socket folder")
    return broken(
        observed,
        "An outgoing connection may hold the engine's port when it starts again",
        Remedy(
            compose='sysctls: {net.ipv4.ip_local_port_range: "32768 60999"}',
            kubernetes='securityContext: {sysctls: [{name: net.ipv4.ip_local_port_range, value: "32768 60999"}]} of '
            "the pod (a safe sysctl)",
        ),
    )


CHECKS: Final = (
    Check(
        id="socket.dir",
        assertion="sockets can be made in the socket folder",
        severity="fail",
        needs=(FOLDER,),
        find=_dir,
    ),
    Check(
        id="socket.shared",
        assertion="the socket folder is a mount that other containers can share",
        severity="warn",
        needs=(CONTAINER, USABLE_FOLDER),
        find=_shared,
    ),
    Check(
        id="network.interface",
        assertion="an engine can be reached over a network, or need not be",
        severity="warn",
        needs=(NETWORK,),
        find=_interfaces,
    ),
    Check(
        id="network.ports",
        assertion="there are ports to listen on that no outgoing connection takes",
        severity="warn",
        needs=(NETWORK,),
        find=_ports,
    ),
)
