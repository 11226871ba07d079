"""The command line as a whole: which commands there are, and what each of them makes a user wait for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from syncstack.cli import COMMANDS, app
from syncstack.doctor.cli import SOCKET_DIR
from syncstack.settings import Settings

HEAVY = ("torch", "pydantic_settings", "httpx", "starlette", "uvicorn", "asyncio")  # pydantic itself is loaded by typer


def test_help_lists_every_command_and_a_typing_error_is_corrected() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).output
    positions = [text.index(f"│ {name} ") for name in COMMANDS]
    assert positions == sorted(positions)
    wrong = CliRunner().invoke(app, ["docto"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert wrong.exit_code == 2
    assert "Did you mean 'doctor'?" in wrong.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_had(name: str) -> None:
    group = typer.main.get_command(app)
    assert group.get_command(None, name).name == name  # type: ignore[attr-defined]
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_doctor_waits_for_no_heavy_import() -> None:
    code = (
        "import sys\nfrom syncstack.cli import app\n"
        "try:\n    app(['doctor', '--only', 'memory.memfd'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"sys.exit(' '.join(name for name in {HEAVY!r} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stderr, done.returncode) == ("", 0)


def test_doctor_looks_where_trainer_and_engine_do() -> None:
    assert Settings.model_fields["socket_dir"].default == SOCKET_DIR
