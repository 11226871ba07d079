"""The command line. Every command ends with 0, 1 (it failed) or 2 (the input was wrong; nothing was started)."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

from syncstack.errors import SyncstackError

# A command's module is imported when it is asked for: `doctor` waits for no HTTP client and no settings model.
COMMANDS: Final = {
    "doctor": "syncstack.doctor.cli:doctor",
    "facts": "syncstack.facts.cli:facts",
    "plan": "syncstack.plan.cli:plan",
    "probe": "syncstack.refit.probe:probe",
    "run": "syncstack.run.cli:run",
    "node": "syncstack.fleet.cli:node",
    "launch": "syncstack.fleet.cli:launch",
    "bench": "syncstack.bench.cli:bench",
    "ports": "syncstack.wire.ports_cli:ports",
    "engine": "syncstack.engines.cli:app",
    "seccomp": "syncstack.seccomp.cli:app",
}


class _Lazy(TyperGroup):
    """The commands of :data:`COMMANDS`, each a function or a Typer of its own."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names, for the lists

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - the base class's
        """Import the command, None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(module), attribute)
        holder = typer.Typer()
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=cmd_name)
        else:
            holder.command(cmd_name)(found)
        return typer.main.get_group(holder).commands[cmd_name]


app = typer.Typer(cls=_Lazy, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Moves a trainer's weights into inference engines inside locked-down containers."""


def main() -> None:
    """Entry point: turns syncstack's errors into one line on standard error and an exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        app()
    except SyncstackError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
