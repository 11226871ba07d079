"""Keeps the run's report: collects records, writes the file after every change, tells the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import msgspec

from syncstack.refit.report import RefitReport
from syncstack.run import schema
from syncstack.run.table import Table

REPORT_NAME = "report.json"
REWARD_WINDOW = 5


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """What the check of one engine measured: see the fields of ``schema.RefitRecord``."""

    max_abs_dlogprob: float | None = None
    tolerance: float | None = None
    stale: float | None = None


class Recorder:
    """The only writer of one run's report. Not thread-safe: one job, one recorder."""

    def __init__(self, report: schema.RunReport, folder: Path, table: Table) -> None:
        """Writes the first report at once, so that a run that dies while starting leaves one. Raises OSError."""
        self.report = report
        self.path = folder / REPORT_NAME
        self.phase_name = "start"
        self._table = table
        self._write()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the run is doing now. If the block raises, the name stays: it is the phase that failed."""
        previous, self.phase_name = self.phase_name, name
        self._table.status(name)
        yield
        self.phase_name = previous

    def engine(self, index: int, name: str, version: str | None) -> None:
        """Say which engine answered at the address of this index."""
        engines = list(self.report.engines)
        engines[index] = msgspec.structs.replace(engines[index], name=name, version=version)
        self._update(engines=engines)

    def step(self, record: schema.StepRecord) -> None:
        """Add a step; updates the reward's first and last means."""
        steps = [*self.report.steps, record]
        self._table.step(record)
        self._update(steps=steps, reward=summarise_reward(steps))

    def refit(self, reports: Sequence[RefitReport], parity: Mapping[str, Parity]) -> None:
        """Add one version's refits, one for each engine, with the check of each engine that was checked, by name."""
        records = [flatten(report, parity.get(report.engine, Parity())) for report in reports]
        self._table.refit(records)
        self._update(refits=[*self.report.refits, *records])

    def finish(self, status: str, error: str | None = None) -> None:
        """Write how the run ended."""
        outcome = msgspec.convert(
            {"status": status, "phase": None if status == "ok" else self.phase_name, "error": error},
            schema.Outcome,
        )
        self._update(outcome=outcome, finished=now())

    def _update(self, **changes: object) -> None:
        self.report = msgspec.structs.replace(self.report, **changes)
        self._write()

    def _write(self) -> None:
        schema.write(self.report, self.path)


def now() -> str:
    """The time of day as the report writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def summarise_reward(steps: Sequence[schema.StepRecord]) -> schema.Reward:
    """Means of the first and last steps: five each, or half of a run that is shorter than ten."""
    if not steps:
        return schema.Reward()
    window = max(1, min(REWARD_WINDOW, len(steps) // 2))
    rewards = [step.reward for step in steps]
    return schema.Reward(first=fmean(rewards[:window]), last=fmean(rewards[-window:]), window=window)


def flatten(report: RefitReport, parity: Parity) -> schema.RefitRecord:
    """The refit's own report as a record of the run's report."""
    return schema.RefitRecord(
        version=report.version,
        engine=report.engine,
        transport=report.transport,
        why_not=dict(report.why_not),
        bytes=report.bytes,
        tensors=report.tensors,
        seconds=report.seconds,
        transport_seconds=report.transport_seconds,
        paused_seconds=report.paused_seconds,
        gb_per_s=report.gb_per_s,
        expected_gb_per_s=report.expected_gb_per_s,
        slow=report.slow,
        phases=dict(report.phases),
        digests_equal=report.digests_equal == report.tensors,
        digests_compared=report.tensors,
        digests_matched=report.digests_equal,
        cast_bytes=report.cast_bytes,
        back_after_s=report.back_after_s,
        unpinned=report.unpinned,
        max_abs_dlogprob=parity.max_abs_dlogprob,
        parity_tolerance=parity.tolerance,
        stale_abs_dlogprob=parity.stale,
    )
