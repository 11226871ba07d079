"""``syncstack doctor --peer``: fetch an engine's hello over its control endpoint, and look at both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from syncstack.doctor.examine import diagnose, examine
from syncstack.doctor.model import Check
from syncstack.doctor.pair import Pair, choice_line, shared
from syncstack.doctor.report import Peer, Report
from syncstack.facts import Facts, say_hello
from syncstack.plan import Policy
from syncstack.refit.client import EngineClient
from syncstack.refit.messages import EngineInfo
from syncstack.settings import Settings
from syncstack.transports import SPOKEN

_WAIT_S: Final = 5.0


def address_of(text: str) -> str:
    """Return an engine's address: ``text`` itself, or ``unix:`` before a folder or the control socket in it."""
    if text.startswith("/"):
        text = f"unix:{text}"
    return text.removesuffix("/control.sock").rstrip("/")


def ask(
    text: str, report: Report, checks: Sequence[Check[Facts]], pair_checks: Sequence[Check[Pair]], settings: Settings
) -> Report:
    """Return ``report`` with the engine's workers added. ``text`` names a folder, a control socket or an address.

    Waits five seconds for an answer. Raises UsageError for an address that is none, EngineNotReady without an answer,
    and what EngineClient raises for an engine that is none of ours.
    """
    address = address_of(text)
    client = EngineClient.connect(address, settings=settings.model_copy(update={"engine_ready_s": _WAIT_S}))
    try:
        info = client.info
    finally:
        client.close()
    way: Literal["unix", "tcp"] = "unix" if address.startswith("unix:") else "tcp"
    trainer = say_hello("trainer", transports=SPOKEN, reachable=(way,), facts=report.facts)
    policy = Policy.of(settings.transport, strict=settings.strict, distinct_gpus=settings.distinct_gpus)
    peers = []
    for worker in info.workers:
        pair = Pair(
            link=f"{info.name} worker {worker.rank}",
            trainer=trainer,
            engine=worker.hello,
            policy=policy,
            weights_bytes=sum(tensor.nbytes for tensor in info.tensors),
        )
        peers.append(_peer(info, pair, checks, pair_checks))
    seen = diagnose(_seen(report.facts, peers), checks)
    return msgspec.structs.replace(report, summary=seen.summary, checks=seen.checks, peers=tuple(peers))


def _seen(facts: Facts, peers: Sequence[Peer]) -> Facts:
    """Return ``facts`` as they look once an engine has been seen in the socket folder.

    A folder that is no mount is private to a container; the engine may be in the same one.
    """
    folder = facts.socket_dir
    if folder is None or not any(peer.shared.folder for peer in peers):
        return facts
    evidence = f"{folder.evidence}; trainer and engine see the same folder"
    return msgspec.structs.replace(facts, socket_dir=msgspec.structs.replace(folder, mounted=True, evidence=evidence))


def _peer(info: EngineInfo, pair: Pair, checks: Sequence[Check[Facts]], pair_checks: Sequence[Check[Pair]]) -> Peer:
    facts = pair.engine.facts
    peer = Peer(
        link=pair.link,
        about=f"{info.kind} {info.kind_version}, syncstack {pair.engine.package}, serves version {info.state.version}",
        shared=shared(pair),
        choice=choice_line(pair),
        checks=(),
        facts=facts,
    )
    outcomes = (*examine(pair, pair_checks), *examine(_seen(facts, [peer]), checks))
    return msgspec.structs.replace(peer, checks=outcomes)
