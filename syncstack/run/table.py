"""The run as a table in the terminal: live where there is a terminal, one plain line a step where there is not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from syncstack.run.schema import RefitRecord, RunReport, StepRecord

COLUMNS = ("step", "reward", "tokens/s", "refit ms", "GB/s", "transport", "parity")
WIDTHS = (6, 7, 9, 9, 6, 10, 8)
MARGIN_ROWS = 8  # header, rules, status line, and what the terminal showed before


class Table:
    """Shows steps as they end. Use as a context manager: it gives the terminal back.

    A row is a step with the refit that followed it; the first row is the refit before the first step.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._rows: list[tuple[str, ...]] = []
        self._step: StepRecord | None = None
        self._status = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            before = sys.stderr
            self._live.start()
            move_logs(before, sys.stderr)
        else:
            self._console.print(_line(COLUMNS), highlight=False, soft_wrap=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status = ""
        if self._live is not None:
            self._live.update(self._render(full=True), refresh=True)
            during = sys.stderr
            self._live.stop()
            move_logs(during, sys.stderr)

    def status(self, text: str) -> None:
        """What the run is doing now. Shown in a live terminal only."""
        self._status = text
        self._refresh()

    def step(self, record: StepRecord) -> None:
        """Remember the step; it is shown with its refit."""
        self._step = record

    def refit(self, records: Sequence[RefitRecord]) -> None:
        """Show the step that just ended and the refits, one for each engine, of the version that it made."""
        row = cells(self._step, records)
        self._step = None
        self._rows.append(row)
        if self._live is None:
            self._console.print(_line(row), highlight=False, soft_wrap=True)
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render(full=False), refresh=True)

    def _render(self, *, full: bool) -> Group:
        room = len(self._rows) if full else max(1, self._console.height - MARGIN_ROWS)
        table = RichTable(*COLUMNS)
        for column in table.columns:
            column.justify = "right"
        for row in self._rows[-room:] if room else []:
            table.add_row(*row)
        return Group(table, Text(self._status)) if self._status else Group(table)


def move_logs(old: TextIO, new: TextIO) -> None:
    """Send log lines to ``new``: a live table puts what is written there above itself instead of being torn by it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


def cells(step: StepRecord | None, refits: Sequence[RefitRecord]) -> tuple[str, ...]:
    """One row as text. Of several engines the slowest one, and the one whose parity is worst."""
    refit = max(refits, key=lambda each: each.seconds)
    checked = [each.max_abs_dlogprob for each in refits if each.max_abs_dlogprob is not None]
    parity = f"{max(checked):.1e}" if checked else "-"
    return (
        "start" if step is None else str(step.step),
        "-" if step is None else f"{step.reward:.3f}",
        "-" if step is None else f"{step.tokens_per_s:.0f}",
        f"{refit.seconds * 1000:.0f}",
        f"{refit.gb_per_s:.2f}",
        refit.transport,
        parity,
    )


def summary(report: RunReport, where: str) -> str:
    """The last lines of a run: what it reached, and where the report is."""
    lines = []
    if report.reward.first is not None and report.reward.last is not None:
        gain = f"{report.reward.first:.3f} -> {report.reward.last:.3f}"
        means = f"means of the first and last {report.reward.window} of {len(report.steps)} steps"
        lines.append(f"reward    {gain} ({means})")
    if report.refits:
        speed = median(refit.gb_per_s for refit in report.refits)
        wall = median(refit.seconds for refit in report.refits)
        equal = sum(refit.digests_equal for refit in report.refits)
        transports = ", ".join(sorted({refit.transport for refit in report.refits}))
        into = f" into {len(report.engines)} engines" if len(report.engines) > 1 else ""
        count = f"{len(report.refits)}{into} by {transports}"
        lines.append(f"refits    {count}, median {wall * 1000:.0f} ms, {speed:.2f} GB/s")
        lines.append(f"digests   equal in {equal} of {len(report.refits)} refits")
    checked = [refit.max_abs_dlogprob for refit in report.refits if refit.max_abs_dlogprob is not None]
    if checked:
        tolerance = report.refits[-1].parity_tolerance
        lines.append(f"parity    largest |dlogprob| {max(checked):.1e}, tolerance {tolerance}")
    lines += [
        f"recovery  {refit.engine} with version {refit.version} after {refit.back_after_s:.1f} s"
        for refit in report.refits
        if refit.back_after_s
    ]
    if report.outcome.status != "ok":
        lines.append(f"outcome   {report.outcome.status} in {report.outcome.phase}")
    lines.append(f"report    {where}")
    return "\n".join(lines)


def _line(row: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(row, WIDTHS, strict=True))
