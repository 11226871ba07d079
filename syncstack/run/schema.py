"""``report.json``: what one run did. Field by field in docs/report.md; the JSON Schema is docs/report.schema.json.

Adding a field keeps ``schema_version``; renaming, removing or changing the meaning of one raises it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from syncstack.files import write_whole

SCHEMA_VERSION: Literal[2] = 2

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engines that served the samples."""

    name: str
    version: str | None = None
    """What the engine's own ``/version`` route says, or null."""
    address: str
    """Where its control endpoint is."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model as its folder holds it."""

    name: str
    parameters: Count
    bytes: Count
    dtype: str


class FactsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer's process may do. Each verdict comes from trying, not from flags."""

    pidfd_getfd: Literal["ok", "denied", "absent", "unknown"] = "unknown"
    """``unknown`` only when the facts could not be collected."""
    syscalls: dict[str, str] = {}
    """Verdict for each system call that was tried."""


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward of the first and of the last ``window`` steps; null before the first step."""

    first: float | None = None
    last: float | None = None
    window: Count = 0


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One training step."""

    step: Count
    version: Count
    """The weights that drew this step's samples."""
    reward: float
    """Mean over all samples of the step."""
    tokens: Count
    """Tokens that the engine generated."""
    tokens_per_s: float
    rollout_s: Seconds
    train_s: Seconds
    loss: float


class RefitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One version moved into one engine: the refit's own report, and the proof that followed it."""

    version: Count
    engine: str
    transport: str
    why_not: dict[str, str]
    bytes: Count
    tensors: Count
    seconds: Seconds
    transport_seconds: Seconds
    paused_seconds: Seconds
    gb_per_s: float
    expected_gb_per_s: float | None = None
    """What a trial of the same workers reached."""
    slow: str = ""
    """The likely cause, where the rate is below half of that."""
    phases: dict[str, float]
    digests_equal: bool
    """Every tensor's digest, as read by the engine, equals the trainer's."""
    digests_compared: Count
    digests_matched: Count
    cast_bytes: Count = 0
    back_after_s: Seconds = 0.0
    """For how long the engine had been left behind before this refit brought it back; 0 if it had not."""
    unpinned: str = ""
    """Why values of a GPU went through memory that is not page-locked; "" where they did not."""
    max_abs_dlogprob: float | None = None
    """Largest |difference| of the engine's log-probabilities of the fixed text from the trainer's; null: unchecked."""
    parity_tolerance: float | None = None
    stale_abs_dlogprob: float | None = None
    """The same against the trainer's *previous* version: what the check would have shown had nothing moved."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the run ended. ``phase`` is what it was doing; ``error`` is one line."""

    status: Literal["running", "ok", "failed", "interrupted"]
    phase: str | None = None
    error: str | None = None


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report. Times of day are UTC, ISO 8601."""

    schema_version: Literal[2] = SCHEMA_VERSION
    syncstack: str
    """This package's version."""
    run: str
    job: str
    seed: int
    layout: str
    profile: str
    """The seccomp profile's name, as the stack was started with; what it does is in ``facts``."""
    engines: list[EngineInfo]
    """In the order in which they were named."""
    model: ModelInfo
    facts: FactsInfo
    reward: Reward
    steps: list[StepRecord]
    refits: list[RefitRecord]
    started: str
    finished: str | None = None
    outcome: Outcome


def write(report: RunReport, path: Path) -> None:
    """Replace ``path`` with ``report``: a reader sees the old file or the new one, never a part. Raises OSError."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def write_text(path: Path, text: str) -> None:
    """``write_whole`` of text, as UTF-8."""
    write_whole(path, text.encode())


def read(path: Path) -> RunReport:
    """Parse and check a report. Raises msgspec.ValidationError when it is not one, or not of this schema version."""
    return msgspec.json.decode(path.read_bytes(), type=RunReport)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of :class:`RunReport`."""
    schema = msgspec.json.schema(RunReport)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "syncstack run report", **schema}


def schema_text() -> str:
    """What docs/report.schema.json holds."""
    return json.dumps(json_schema(), indent=2) + "\n"


def main(arguments: list[str]) -> int:
    """Print the schema, or with ``--check FILE`` compare it with the file: 1 when they differ."""
    if arguments[:1] != ["--check"]:
        print(schema_text(), end="")
        return 0
    file = Path(arguments[1])
    if file.is_file() and file.read_text() == schema_text():
        return 0
    print(f"error: {file} is not the report's schema. Next: python -m syncstack.run.schema > {file}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
