"""Outcomes as text for people, as JSON for programs and as Markdown for issues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from syncstack.doctor.model import Check, Outcome, Remedy, Status
from syncstack.doctor.report import Report

_MARKS: dict[Status, tuple[str, str]] = {
    "pass": ("ok", "green"),
    "warn": ("warning", "yellow"),
    "fail": ("FAIL", "bold red"),
    "skip": ("skipped", "dim"),
    "crashed": ("CRASHED", "bold magenta"),
}
# Of containers, GPUs, hosts: they help nobody who reads an issue. A number is none.
_IDENTIFIER = re.compile(r"\b(?=[0-9]*[a-f])[0-9a-f]{12,64}\b")
_ATTENTION: tuple[Status, ...] = ("warn", "fail", "crashed")


def _plain(text: str) -> str:
    """Return ``text`` without anything that a terminal would take for a command: a peer wrote some of it."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _advice(remedy: Remedy) -> list[tuple[str, str]]:
    return [("do", remedy.other), ("compose", remedy.compose), ("kubernetes", remedy.kubernetes)]


def _print(console: Console, outcome: Outcome) -> None:
    mark, style = _MARKS[outcome.status]
    bad = outcome.status in _ATTENTION
    # An assertion that does not hold would read as its opposite next to "warning".
    wanted = "should be: " if bad else ""
    console.print(Text.assemble((f"{mark:8}", style), f"{outcome.id:26} {wanted}{outcome.assertion}"), soft_wrap=True)
    lines = [("", outcome.observed), ("so: ", outcome.consequence)]
    lines += [(f"{label}: " if bad else f"if needed, {label}: ", text) for label, text in _advice(outcome.remedy)]
    lines += [("see: ", outcome.hint if bad else "")]
    for label, text in lines:
        if text:
            console.print(Text(_plain(f"        {label}{text}")), soft_wrap=True)


def _print_all(console: Console, outcomes: Iterable[Outcome], *, verbose: bool) -> None:
    for outcome in outcomes:
        if verbose or outcome.status in _ATTENTION:
            _print(console, outcome)


def text(console: Console, report: Report, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print what needs attention (``verbose``: everything), then the summary line (``quiet``: only with a problem)."""
    _print_all(console, report.checks, verbose=verbose)
    for peer in report.peers:
        console.print(Text(_plain(f"{peer.link}: {peer.about}")), soft_wrap=True)
        _print_all(console, peer.checks, verbose=verbose)
        for line in (*peer.shared.lines(), peer.choice):
            console.print(Text(_plain(f"        {line}")), soft_wrap=True)
    if not quiet or any(outcome.status in _ATTENTION for outcome in report.all_checks()):
        console.print(Text(_plain(report.summary)), soft_wrap=True)


def json(report: Report) -> str:
    """Return the outcomes and the facts they rest on as one JSON document."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def _code(text: str) -> str:
    """Return text that no site turns into markup, mentions or links."""
    return "`" + _plain(text).replace("`", "'") + "`"


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    rows = ["| check | result | observed |", "|---|---|---|"]
    for one in outcomes:
        mark = _MARKS[one.status][0]
        observed = _code(one.observed).replace("|", "\\|")
        rows.append(f"| {one.id} | {f'**{mark}**' if one.status in _ATTENTION else mark} | {observed} |")
    return [*rows, ""]


def _block(lines: Iterable[str]) -> list[str]:
    return ["```text", *(_plain(line).replace("```", "'''") for line in lines), "```", ""]


def markdown(report: Report) -> str:
    """Return a text to paste into an issue: the summary, the checks, the evidence; identifiers are cut short."""
    lines = [f"**syncstack doctor**: {_code(report.summary)}", "", *_block(report.about()), *_table(report.checks)]
    for peer in report.peers:
        lines += [f"**{_plain(peer.link)}**", "", *_block((peer.about, *peer.shared.lines(), peer.choice))]
        lines += _table(peer.checks)
    whole = "\n".join([*lines, "Evidence:", "", *_block(report.evidence())])
    return _IDENTIFIER.sub(lambda found: f"{found[0][:4]}...", whole)


def listing(console: Console, checks: Iterable[Check[Any]]) -> None:
    """Print ids, assertions, and what a check needs."""
    for check in checks:
        needs = ", ".join(need.name for need in check.needs)
        console.print(Text(f"{check.id:26} {check.assertion}{f'  (needs: {needs})' if needs else ''}"), soft_wrap=True)
