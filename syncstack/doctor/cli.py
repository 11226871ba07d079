"""``syncstack doctor``: will a refit work here, and if not, what to change."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncstack.doctor import render
from syncstack.doctor.examine import diagnose, exit_code, select
from syncstack.errors import UsageError
from syncstack.facts import collect

# The default of Settings.socket_dir. The settings model itself costs more than all checks together.
SOCKET_DIR = Path("/run/syncstack")


class Output(Enum):
    """Forms of output."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def doctor(
    output: Annotated[Output, typer.Option("--output", "-o", help="Form of the output.")] = Output.TEXT,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show also what passed or was skipped.")] = False,
    pre: Annotated[bool, typer.Option("--pre", help="Before anything is started: print problems only.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run this check only (repeatable).")] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks and run none.")] = False,
    peer: Annotated[
        str | None, typer.Option(help="An engine to ask as well: its folder, unix:FOLDER or tcp://HOST:PORT.")
    ] = None,
    socket_dir: Annotated[
        Path, typer.Option(envvar="SYNCSTACK_SOCKET_DIR", help="Folder of the sockets.")
    ] = SOCKET_DIR,
) -> None:
    """Check what this process can do. Exit 0: nothing failed; 1: a check failed; 2: wrong use."""
    if pre and peer is not None:
        raise UsageError("--pre is for the time before an engine runs, --peer for the time after", next_step="drop one")
    checks, pair_checks = select(only or [], peer=peer is not None or list_checks)
    console = Console(highlight=False)
    if list_checks:
        render.listing(console, (*checks, *pair_checks))
        return
    report = diagnose(collect(socket_dir=socket_dir), checks)
    if peer is not None:
        # An HTTP client and the settings model, which nothing else here waits for.
        from syncstack.doctor.peer import ask
        from syncstack.settings import Settings

        report = ask(peer, report, checks, pair_checks, Settings.load(socket_dir=socket_dir))
    if output is Output.JSON:
        typer.echo(render.json(report))
    elif output is Output.MARKDOWN:
        typer.echo(render.markdown(report))
    else:
        render.text(console, report, verbose=verbose, quiet=pre)
    raise typer.Exit(exit_code(report.all_checks()))
