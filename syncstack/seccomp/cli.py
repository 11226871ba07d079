"""``syncstack seccomp``: generate and verify the profiles, explain an answer, run a command under a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncstack.facts.process import bounding_capabilities
from syncstack.seccomp import generate as generator
from syncstack.seccomp.apply import Applied, execute
from syncstack.seccomp.apply import apply as apply_profile
from syncstack.seccomp.explain import explain as explain_call
from syncstack.seccomp.load import DOCKER_CAPABILITIES, load

app = typer.Typer(name="seccomp", help="The seccomp profiles: generate, verify, explain, run.", no_args_is_help=True)

_Folder = Annotated[Path, typer.Option("--out", help="Folder of the profiles.", file_okay=False)]


@app.command()
def generate(out: _Folder = Path("seccomp")) -> None:
    """Write permissive.json and restrictive.json from the table."""
    for path in generator.write(out):
        typer.echo(f"wrote {path}")


@app.command()
def verify(out: _Folder = Path("seccomp")) -> None:
    """Check that the files are what the table generates."""
    generator.verify(out)
    typer.echo(f"{out}: up to date")


@app.command()
def explain(syscall: Annotated[str, typer.Argument(help="Name of a system call, such as pidfd_getfd.")]) -> None:
    """Say what each profile answers to a system call, and why."""
    explanation = explain_call(syscall)
    for profile, answer in explanation.answers.items():
        typer.echo(f"{profile:12} {answer}")
    typer.echo(f"{'why':12} {explanation.why}")


def _capabilities(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    if text == "docker":
        return DOCKER_CAPABILITIES
    if text == "bounding":
        return bounding_capabilities()
    return tuple(name.strip().upper() for name in text.split(","))


def _report(applied: Applied) -> None:
    for what, names in (("skipped", applied.skipped), ("NOT DENIED", applied.not_denied)):
        if names:
            typer.echo(f"{what}, unknown to this libseccomp: {' '.join(names)}", err=True)


@app.command()
def run(
    profile: Annotated[str, typer.Argument(help="permissive, restrictive, or a file (flat OCI or Docker's format).")],
    command: Annotated[list[str], typer.Argument(help="The command, after --.")],
    caps: Annotated[
        str, typer.Option(help="For a Docker-format file: none, docker, bounding, or CAP_A,CAP_B.")
    ] = "none",
    explain_names: Annotated[bool, typer.Option("--explain", help="List the names that were skipped.")] = False,
) -> None:
    """Run a command under a profile, without a container. The filter holds for everything that it starts."""
    applied = apply_profile(load(profile, caps=_capabilities(caps)))
    if explain_names or applied.not_denied:
        _report(applied)
    execute(command)
