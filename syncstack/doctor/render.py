"""Outcomes as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from syncstack.doctor.model import Check, Outcome, Status
from syncstack.facts import Facts

_MARKS: dict[Status, tuple[str, str]] = {
    "pass": ("ok", "green"),
    "warn": ("warning", "yellow"),
    "fail": ("FAIL", "bold red"),
    "skip": ("skipped", "dim"),
    "crashed": ("CRASHED", "bold magenta"),
}
_ATTENTION: tuple[Status, ...] = ("warn", "fail", "crashed")


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What ``-o json`` prints."""

    version: int = 1
    summary: str
    checks: tuple[Outcome, ...]
    facts: Facts


def _print(console: Console, outcome: Outcome) -> None:
    mark, style = _MARKS[outcome.status]
    # An assertion that does not hold would read as its opposite next to "warning".
    wanted = "should be: " if outcome.status in _ATTENTION else ""
    console.print(Text.assemble((f"{mark:8}", style), f"{outcome.id:26} {wanted}{outcome.assertion}"), soft_wrap=True)
    lines = [("", outcome.observed), ("so: ", outcome.consequence), ("do: ", outcome.remedy)]
    if outcome.status in _ATTENTION:
        lines.append(("see: ", outcome.hint))
    for label, text in lines:
        if text:
            console.print(Text(f"        {label}{text}"), soft_wrap=True)


def text(console: Console, outcomes: Iterable[Outcome], summary: str, *, verbose: bool) -> None:
    """Print what needs attention (``verbose``: everything), then the summary line."""
    for outcome in outcomes:
        if verbose or outcome.status in _ATTENTION:
            _print(console, outcome)
    console.print(Text(summary), soft_wrap=True)


def json(outcomes: Sequence[Outcome], summary: str, facts: Facts) -> str:
    """Return the outcomes and the facts they rest on as one JSON document."""
    document = Document(summary=summary, checks=tuple(outcomes), facts=facts)
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def listing(console: Console, checks: Iterable[Check]) -> None:
    """Print ids and assertions."""
    for check in checks:
        console.print(Text(f"{check.id:26} {check.assertion}"), soft_wrap=True)
