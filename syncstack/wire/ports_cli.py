"""``syncstack ports``: the bands, and who listens in them."""

from __future__ import annotations

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from syncstack.errors import SettingsError
from syncstack.facts.listeners import Listener, listeners
from syncstack.facts.network import network
from syncstack.output import Output, OutputOption
from syncstack.settings import Settings
from syncstack.wire.ports import Band, check, parse

SHOWN = 5
"""Holders of one band that the table names."""

PURPOSE = {
    "ray": "Ray's own ports",
    "rendezvous": "stores and side groups of your trainer",
    "http": "the engines' own servers",
    "control": "`syncstack engine --listen tcp://ADDRESS:auto`",
    "data": "its workers' data links",
    "metrics": "`syncstack run --metrics`",
    "router": "routers before engines",
}


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What ``-o json`` prints. ``problem`` is "" where the bands can be used."""

    version: int = 1
    bands: tuple[Band, ...]
    taken: tuple[Listener, ...]
    ephemeral: tuple[int, int]
    problem: str = ""


def ports(
    output: OutputOption = Output.TEXT,
) -> None:
    """The bands of ports, and who listens in them. Exit 0: they can be used; 1: they cannot; 2: they make no sense."""
    bands = parse(Settings.load().port_bands)
    facts = network()
    problem = ""
    try:
        check(bands, facts)
    except SettingsError as error:
        problem = str(error)
    low, high = min(band.low for band in bands.values()), max(band.high for band in bands.values())
    document = Document(
        bands=tuple(bands.values()),
        taken=tuple(listeners(low, high).values()),
        ephemeral=(facts.ephemeral_low, facts.ephemeral_high),
        problem=problem,
    )
    if output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        _render(Console(highlight=False), document)
    raise typer.Exit(int(bool(problem)))


def _render(console: Console, document: Document) -> None:
    table = Table()
    for column in ("band", "ports", "for", "taken"):
        table.add_column(column, overflow="fold")
    for band in document.bands:
        held = [f"{each.port}: {each}" for each in document.taken if band.low <= each.port <= band.high]
        more = [f"and {len(held) - SHOWN} more"] if len(held) > SHOWN else []
        table.add_row(band.name, f"{band.low}-{band.high}", PURPOSE[band.name], "\n".join([*held[:SHOWN], *more]))
    console.print(table)
    console.print(f"outgoing connections take {document.ephemeral[0]}-{document.ephemeral[1]}")
    if document.problem:
        console.print(document.problem, soft_wrap=True)
