"""``syncstack seccomp``: generate, verify, check, explain and compare profiles; run or record a command under one; put
them on a node, and wait for them there."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from syncstack.errors import DeadlineExceeded, UsageError
from syncstack.facts.process import CAPABILITY_NAMES, bounding_capabilities
from syncstack.output import Output, OutputOption
from syncstack.seccomp import check as checker
from syncstack.seccomp import diff as differ
from syncstack.seccomp import generate as generator
from syncstack.seccomp import install as installer
from syncstack.seccomp import record as recorder
from syncstack.seccomp import render
from syncstack.seccomp.apply import apply as apply_profile
from syncstack.seccomp.apply import execute, restore_signals
from syncstack.seccomp.compile import Compiled
from syncstack.seccomp.explain import explain as explain_call
from syncstack.seccomp.load import DOCKER_CAPABILITIES, NAMES, RUNTIMES, load
from syncstack.wire.tcp import Address

app = typer.Typer(
    name="seccomp",
    help="The seccomp profiles: generate, verify, check, explain, diff, run, record, install, await.",
    no_args_is_help=True,
)


_PROFILE = f"{', '.join(NAMES)}, or a file (flat OCI or Docker's format)."
_Folder = Annotated[Path, typer.Option("--out", help="Folder of the profiles.", file_okay=False)]
_Profile = Annotated[str, typer.Argument(help=_PROFILE)]
_Command = Annotated[list[str], typer.Argument(help="The command, after --.")]
_Caps = Annotated[
    str, typer.Option(help="Bounding set that conditions are decided for: none, docker, bounding, CAP_A, with commas.")
]
_Kernel = Annotated[str, typer.Option(help="Kernel X.Y that conditions are decided for.", show_default="this one")]
Runtime = Enum("Runtime", {name: name for name in RUNTIMES})  # type: ignore[misc]


def _print(output: Output, found: Any, lines: Iterable[str]) -> None:
    if output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
        return
    for line in lines:
        typer.echo(line)


def capabilities(text: str) -> tuple[str, ...]:
    """Return the capabilities that ``--caps`` names; ``UsageError`` for an unknown one."""
    sets = {"none": (), "docker": DOCKER_CAPABILITIES, "bounding": bounding_capabilities()}
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        name = part.upper()
        if part not in sets and name not in CAPABILITY_NAMES:
            raise UsageError("unknown capability", observed=repr(part), expected="none, docker, bounding or CAP_...")
        found += sets.get(part, (name,))
    return tuple(dict.fromkeys(found))


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
def check(
    profile: _Profile,
    caps: _Caps = "none",
    kernel: _Kernel = "",
    runtime: Annotated[
        list[Runtime] | None,
        typer.Option(help="Read it as this runtime does (repeatable).", show_default="docker, containerd"),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Check what a profile denies of what is needed, and what it lets through of what is dangerous.

    Exit 0: fine; 1: something needed is denied or something dangerous is open; 2: not a profile.
    """
    runtimes = [name for name in RUNTIMES if name in {which.value for which in runtime or []}]
    found = checker.check(profile, caps=capabilities(caps), kernel=kernel, runtimes=runtimes)
    _print(output, found, render.report(found))
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def explain(
    syscall: Annotated[str, typer.Argument(help="Name of a system call, such as pidfd_getfd.")],
    profile: Annotated[list[str] | None, typer.Option(help=f"One more profile (repeatable): {_PROFILE}")] = None,
    caps: _Caps = "none",
    kernel: _Kernel = "",
    output: OutputOption = Output.TEXT,
) -> None:
    """Say what each profile answers to a system call, why, and who needs it."""
    found = explain_call(syscall, profiles=profile or [], caps=capabilities(caps), kernel=kernel)
    _print(output, found, render.explanation(found))


@app.command()
def diff(
    first: _Profile,
    second: _Profile,
    caps: _Caps = "none",
    kernel: _Kernel = "",
    output: OutputOption = Output.TEXT,
) -> None:
    """Compare what two profiles answer to every system call. Exit 0: the same; 1: they differ."""
    found = differ.compare(first, second, caps=capabilities(caps), kernel=kernel)
    _print(output, found, render.comparison(found))
    raise typer.Exit(1 if found.differences else 0)


def _report(compiled: Compiled) -> None:
    for what, names in (("skipped", compiled.skipped), ("NOT DENIED", compiled.not_denied)):
        if names:
            typer.echo(f"{what}, unknown to this libseccomp: {' '.join(names)}", err=True)


@app.command()
def run(
    profile: _Profile,
    command: _Command,
    caps: _Caps = "none",
    kernel: _Kernel = "",
    explain_names: Annotated[bool, typer.Option("--explain", help="List the names that were skipped.")] = False,
) -> None:
    """Run a command under a profile, without a container. The filter holds for everything that it starts."""
    found = load(profile, caps=capabilities(caps), kernel=kernel)
    restore_signals()
    compiled = apply_profile(found)
    if explain_names or compiled.not_denied:
        _report(compiled)
    execute(command)


@app.command()
def record(
    command: _Command,
    profile: Annotated[str, typer.Option(help=f"Run it under this profile: {_PROFILE}", show_default="none")] = "",
    caps: _Caps = "none",
    write: Annotated[
        Path | None, typer.Option(help="Write a flat profile that allows what was seen.", dir_okay=False)
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Kill the command after this many seconds.")] = 600.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run a command and list the system calls that it used, and those that were refused.

    Its output goes to standard error. Exits as the command does; 1 if it did not end in time.
    """
    found = recorder.record(command, profile=profile, caps=capabilities(caps), timeout_s=timeout)
    if write is not None:
        write.write_bytes(msgspec.json.format(msgspec.json.encode(recorder.allow_list(found)), indent=2) + b"\n")
    _print(output, found, render.recording(found))
    if found.exit is None:
        raise DeadlineExceeded(f"the command was ended after {timeout:g} s", next_step="give more by --timeout")
    raise typer.Exit(found.exit if found.exit >= 0 else 128 - found.exit)


@app.command()
def install(
    source: Annotated[Path, typer.Argument(help="Folder with the profiles.", file_okay=False)],
    target: Annotated[Path, typer.Argument(help="Folder on the node, below its kubelet's `seccomp`.", file_okay=False)],
    serve: Annotated[
        str, typer.Option(help="Then answer for what was installed at ADDRESS:PORT, until SIGTERM.", show_default=False)
    ] = "",
) -> None:
    """Write profiles into a folder, each at once or not at all. A node's kubelet reads them there."""
    address = Address.parse(f"tcp://{serve}") if serve else None
    digests = installer.install(source, target)
    for name, digest in digests.items():
        typer.echo(f"installed {target / name}, sha256 {digest}")
    if address is not None:
        installer.serve(digests, address)


@app.command("await")
def await_profile(
    profile: Annotated[Path, typer.Argument(help="The profile that the node is to have.", exists=True, dir_okay=False)],
    at: Annotated[str, typer.Option(help="Where the node's installer answers, http://HOST:PORT.")],
    wait: Annotated[float, typer.Option(min=0, help="Seconds.")] = 120.0,
) -> None:
    """Wait until this node has a profile, this very content: a pod's first container, before the ones it is for."""
    installer.await_installed(profile, at, wait, typer.echo)
    typer.echo(f"this node has seccomp profile {profile.name}")
