"""``syncstack probe``: everything that a refit does before it touches an engine's weights, with what it measured."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from syncstack.plan import FdWay
from syncstack.refit.agreement import Agreement
from syncstack.refit.client import EngineClient
from syncstack.refit.target import Target
from syncstack.settings import Settings
from syncstack.weights.manifest import Wanted


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one probe found. Rates are bytes per second over all workers together."""

    engine: str
    address: str
    transport: str
    fd: FdWay
    """How descriptors travelled: ``scm``, ``pidfd``, or "" where none did."""
    workers: int
    digests_equal: bool
    """Always true: a worker whose digest differs has refused, and then there is no report."""
    bytes_per_s: float
    first_bytes_per_s: float
    why_not: dict[str, str]


def probe(
    peer: Annotated[str, typer.Option(help="Control address of a running engine: unix:FOLDER or tcp://HOST:PORT.")],
    output: Annotated[Literal["text", "json"], typer.Option("--output", "-o", help="text or json.")] = "text",
    wait: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the engine to answer.")] = 5.0,
) -> None:
    """Move real buckets to a running engine as a refit would, and time them; it serves on, and loads nothing."""
    settings = Settings.load(engine_ready_s=wait)
    report = find(peer, settings)
    if output == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    else:
        _show(report)


def find(address: str, settings: Settings) -> ProbeReport:
    """Plan, try and measure the links to one engine. Raises what a refit would raise before its first byte."""
    agreement = Agreement(settings)
    client = EngineClient.connect(address, settings=settings)
    target = Target(client)
    try:
        wanted = [Wanted(meta=meta, source=meta.name) for meta in client.info.tensors]
        transport = agreement.reach([target], wanted)
        assert agreement.rate is not None
        return ProbeReport(
            engine=client.name,
            address=address,
            transport=transport,
            fd=target.choice.fd,
            workers=len(target.links),
            digests_equal=True,
            bytes_per_s=agreement.rate.again,
            first_bytes_per_s=agreement.rate.first,
            why_not=target.choice.why_not,
        )
    finally:
        target.drop_links()
        client.close()


def _show(report: ProbeReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    way = {"scm": ", descriptors by SCM_RIGHTS", "pidfd": ", descriptors by pidfd_getfd", "": ""}[report.fd]
    console.print(f"[bold]{report.engine}[/] ({report.address}): {report.transport}{way}")
    console.print(f"  digests equal on {report.workers} worker{'s' * (report.workers > 1)}")
    console.print(f"  {report.bytes_per_s / 1e9:.2f} GB/s; the first time {report.first_bytes_per_s / 1e9:.2f} GB/s")
    for name, reason in report.why_not.items():
        console.print(f"  not {name}: {reason}", markup=False)
