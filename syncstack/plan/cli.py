"""``syncstack plan``: explain offline which transport two processes would take, from the hellos that they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from syncstack.errors import PlanError, UsageError
from syncstack.facts import Hello
from syncstack.facts.hello import HELLO_VERSION
from syncstack.output import Output, OutputOption
from syncstack.plan.choose import Row, choose, explain
from syncstack.plan.model import Choice, Policy
from syncstack.settings import Settings

MAX_HELLO_BYTES = 4 << 20
"""A hello is some 10 kB; files of this command come by mail."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What ``-o json`` prints. ``problem`` is "" where there is a choice."""

    version: int = 1
    choice: Choice | None
    problem: str = ""
    transports: tuple[Row, ...]


def plan(
    sender: Annotated[Path, typer.Option("--from", help="The trainer's hello: what `syncstack facts -o json` wrote.")],
    receiver: Annotated[Path, typer.Option("--to", help="The engine's hello.")],
    output: OutputOption = Output.TEXT,
    transport: Annotated[
        str | None,
        typer.Option(help="auto, or names in order (SYNCSTACK_TRANSPORT).", show_default=False),
    ] = None,
    strict: Annotated[
        bool | None, typer.Option(help="Refuse a fallback (SYNCSTACK_STRICT).", show_default=False)
    ] = None,
) -> None:
    """Say which transport a link would take, and why not a better one. Exit 0: there is one; 1: none; 2: wrong use."""
    settings = Settings.load(transport=transport, strict=strict)
    policy = Policy.of(settings.transport, strict=settings.strict)
    ends = read_hello(sender), read_hello(receiver)
    rows = explain(*ends, policy)
    choice, problem = None, ""
    try:
        choice = choose(*ends, policy)
    except PlanError as error:
        problem = str(error)
    document = Document(choice=choice, problem=problem, transports=rows)
    if output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        render(Console(highlight=False), document)
    raise typer.Exit(int(choice is None))


def read_hello(path: Path) -> Hello:
    """The hello in a file. Raises UsageError for anything else; reads no more than MAX_HELLO_BYTES."""
    hint = "write it with `syncstack facts -o json` in the process's own container"
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file", next_step=hint)  # a pipe that nobody writes would hold us
        with path.open("rb") as file:
            data = file.read(MAX_HELLO_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", observed=error.strerror, next_step=hint) from None
    if len(data) > MAX_HELLO_BYTES:
        raise UsageError(f"{path} is too large for a hello", expected=f"<= {MAX_HELLO_BYTES} bytes", next_step=hint)
    try:
        hello = msgspec.json.decode(data, type=Hello)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} holds no hello", observed=printable(str(error)), next_step=hint) from None
    if hello.version != HELLO_VERSION:
        raise UsageError(
            f"{path} holds a hello of another version",
            observed=str(hello.version),
            expected=str(HELLO_VERSION),
            next_step="run the same syncstack release on both sides",
        )
    return hello


def printable(text: str) -> str:
    """``text`` without anything that a terminal would take for a command: the file may be a stranger's."""
    return "".join(char if char.isprintable() else "?" for char in text)


def render(console: Console, document: Document) -> None:
    """One line for each transport of the policy, what it lacks below it, and the choice at the end."""
    chosen = document.choice.transport if document.choice is not None else ""
    for row in document.transports:
        mark = "chosen" if row.transport == chosen else "no" if row.unmet else "usable"
        console.print(Text.assemble((f"{mark:8}", "green" if mark == "chosen" else ""), row.transport))
        for lack in row.unmet:
            console.print(Text(printable(f"        needs {lack.need}: {lack.reason}")), soft_wrap=True)
    console.print(Text(printable(document.problem or _summary(document))), soft_wrap=True)


def _summary(document: Document) -> str:
    choice = document.choice
    assert choice is not None
    way = {"": "", "scm": ", descriptors by unix socket", "pidfd": ", descriptors by pidfd_getfd"}[choice.fd]
    rate = choice.expected_bytes_per_s
    return f"{choice.transport}{way}; expected {f'{rate / 1e9:.0f} GB/s' if rate else 'rate unknown'}: {choice.basis}"
