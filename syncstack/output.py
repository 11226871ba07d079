"""The forms in which a command prints what it has found."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Output(Enum):
    """For a person, or for a program."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Form of the output.")]
