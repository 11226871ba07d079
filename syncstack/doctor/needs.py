"""What checks need before they can be made."""

from __future__ import annotations

from typing import Final

from syncstack.doctor.model import Need
from syncstack.facts import Facts


def _container(facts: Facts) -> str:
    return "" if facts.in_container else "not in a container"


def _folder(facts: Facts) -> str:
    return "" if facts.socket_dir is not None else "no socket folder given"


def _usable_folder(facts: Facts) -> str:
    if facts.socket_dir is None or not facts.socket_dir.writable:
        return "no socket can be made there anyway"
    return ""


def _identity(facts: Facts) -> str:
    return "" if facts.identity is not None else "these facts do not say who the process is"


def _network(facts: Facts) -> str:
    network = facts.network
    return "" if network.interfaces or network.evidence else "these facts say nothing of the network"


def _gpu(facts: Facts) -> str:
    return "" if facts.gpu.count or facts.gpu.devices else "no GPU here"


def _driver(facts: Facts) -> str:
    if facts.gpu.devices:
        return ""
    return "the driver named no device" if facts.gpu.count else "no GPU here"


CONTAINER: Final = Need[Facts](name="container", lack=_container)
FOLDER: Final = Need[Facts](name="socket folder", lack=_folder)
USABLE_FOLDER: Final = Need[Facts](name="usable socket folder", lack=_usable_folder)
IDENTITY: Final = Need[Facts](name="identity", lack=_identity)
NETWORK: Final = Need[Facts](name="network", lack=_network)
GPU: Final = Need[Facts](name="GPU", lack=_gpu)
DRIVER: Final = Need[Facts](name="GPU driver", lack=_driver)
