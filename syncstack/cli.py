"""The command line. Every command ends with 0, 1 (it failed) or 2 (the input was wrong; nothing was started)."""

from __future__ import annotations

import logging
import sys

import typer

from syncstack.doctor.cli import doctor
from syncstack.engines.cli import app as engine_app
from syncstack.errors import SyncstackError
from syncstack.plan.cli import plan
from syncstack.run.cli import run
from syncstack.seccomp.cli import app as seccomp_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moves a trainer's weights into inference engines inside locked-down containers.",
)
app.command()(doctor)
app.command()(plan)
app.command()(run)
app.add_typer(engine_app, name="engine")
app.add_typer(seccomp_app, name="seccomp")


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
