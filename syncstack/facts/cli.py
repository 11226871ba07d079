"""``syncstack facts``: what this process can really do, as a screen for people or as a hello for ``syncstack plan``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from syncstack.facts.collect import collect
from syncstack.facts.hello import Role, say_hello
from syncstack.facts.render import render
from syncstack.output import Output, OutputOption
from syncstack.transports import SPOKEN

# The default of Settings.socket_dir. The settings model itself takes longer than all facts together.
_SOCKET_DIR: Final = Path("/run/syncstack")


class Side(Enum):
    """What the process is in a refit; typer wants an Enum where the hello has a Literal."""

    TRAINER = "trainer"
    ENGINE = "engine"


def facts(
    output: OutputOption = Output.TEXT,
    role: Annotated[Side, typer.Option(help="The side that this process stands for.")] = Side.TRAINER,
    socket_dir: Annotated[
        Path, typer.Option(envvar="SYNCSTACK_SOCKET_DIR", help="Folder of the sockets.")
    ] = _SOCKET_DIR,
) -> None:
    """Show what this process can do, each fact with its evidence. -o json writes a hello, which `plan` reads."""
    side: Role = "trainer" if role is Side.TRAINER else "engine"
    hello = say_hello(side, transports=SPOKEN, facts=collect(socket_dir=socket_dir))
    if output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(hello), indent=2).decode())
    else:
        render(Console(highlight=False), hello.facts)
