"""The report: its schema, its file, what the recorder makes of a run, and the picture and table made from it."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import msgspec
import pytest
from rich.console import Console

from syncstack.refit.report import RefitReport
from syncstack.run import schema
from syncstack.run.picture import render, ticks
from syncstack.run.recorder import Parity, Recorder, summarise_reward
from syncstack.run.table import Table, summary

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "report.schema.json"


def new_report(run: str = "test") -> schema.RunReport:
    return schema.RunReport(
        syncstack="0",
        run=run,
        job="a:b",
        seed=0,
        layout="colocated",
        profile="restrictive",
        engines=[schema.EngineInfo(name="engine-0", address="unix:/run/syncstack/engine-0")],
        model=schema.ModelInfo(name="m", parameters=10, bytes=20, dtype="bfloat16"),
        facts=schema.FactsInfo(pidfd_getfd="denied", syscalls={"kcmp": "denied"}),
        reward=schema.Reward(),
        steps=[],
        refits=[],
        started="2026-01-01T00:00:00+00:00",
        outcome=schema.Outcome(status="running"),
    )


def refit(version: int, *, equal: int = 3, seconds: float = 0.5) -> RefitReport:
    return RefitReport(
        version=version,
        engine="engine-0",
        transport="host_fd",
        why_not={"cuda_fd": "no GPU"},
        bytes=1000,
        tensors=3,
        seconds=seconds,
        transport_seconds=0.1,
        paused_seconds=0.3,
        gb_per_s=1.25,
        phases={"begin": 0.1, "load": 0.2},
        digests_equal=equal,
    )


def step(number: int, reward: float = 0.5) -> schema.StepRecord:
    return schema.StepRecord(
        step=number, version=number, reward=reward, tokens=64, tokens_per_s=32.0, rollout_s=2.0, train_s=1.0, loss=0.1
    )


def record(folder: Path, *, steps: int, console: Console | None = None) -> Recorder:
    with Table(console or Console(file=io.StringIO())) as table:
        recorder = Recorder(new_report(), folder, table)
        recorder.refit([refit(1)], {"engine-0": Parity(max_abs_dlogprob=1e-4, tolerance=1e-3)})
        for number in range(1, steps + 1):
            recorder.step(step(number, number / steps))
            recorder.refit([refit(number + 1)], {"engine-0": Parity(max_abs_dlogprob=1e-4, tolerance=1e-3, stale=0.2)})
    return recorder


def test_the_schema_file_is_the_one_of_the_code() -> None:
    assert SCHEMA_FILE.read_text() == schema.schema_text(), "python -m syncstack.run.schema > docs/report.schema.json"


def test_every_field_is_described_on_the_page() -> None:
    page = (SCHEMA_FILE.parent / "report.md").read_text()
    fields = {f for d in json.loads(SCHEMA_FILE.read_text())["$defs"].values() for f in d["properties"]}
    assert sorted(f for f in fields if f"`{f}`" not in page) == []


def test_the_file_is_valid_after_every_change(tmp_path: Path) -> None:
    recorder = record(tmp_path, steps=3)
    recorder.finish("ok")
    value = json.loads(recorder.path.read_text())
    jsonschema.validate(value, json.loads(SCHEMA_FILE.read_text()))
    assert value["schema_version"] == 2
    assert schema.read(recorder.path) == recorder.report
    assert [r["version"] for r in value["refits"]] == [1, 2, 3, 4]
    assert value["outcome"] == {"status": "ok", "phase": None, "error": None}


def test_a_run_that_just_dies_leaves_a_report_that_says_running(tmp_path: Path) -> None:
    recorder = record(tmp_path, steps=2)
    on_disk = schema.read(recorder.path)
    assert on_disk.outcome.status == "running"
    assert len(on_disk.steps) == 2


def test_a_failed_write_keeps_the_old_file_and_leaves_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    schema.write(new_report(), path)
    before = path.read_bytes()
    bad = msgspec.structs.replace(new_report(), seed="\ud800")  # a surrogate cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        schema.write(bad, path)
    with pytest.raises(UnicodeEncodeError):
        schema.write_text(path, "\ud800")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    schema.write(new_report(), path)
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    with pytest.raises(msgspec.ValidationError, match="schema_version"):
        schema.read(path)


def test_one_unequal_digest_is_not_all_equal(tmp_path: Path) -> None:
    recorder = Recorder(new_report(), tmp_path, Table(Console(file=io.StringIO())))
    recorder.refit([refit(1, equal=2)], {})
    record_ = recorder.report.refits[0]
    assert (record_.digests_equal, record_.digests_matched, record_.digests_compared) == (False, 2, 3)


def test_parity_is_claimed_only_for_the_engine_that_was_asked(tmp_path: Path) -> None:
    recorder = Recorder(new_report(), tmp_path, Table(Console(file=io.StringIO())))
    other = msgspec.structs.replace(refit(1), engine="engine-1")
    recorder.refit([refit(1), other], {"engine-0": Parity(max_abs_dlogprob=0.1, tolerance=0.5)})
    assert [r.max_abs_dlogprob for r in recorder.report.refits] == [0.1, None]


@pytest.mark.parametrize(("count", "window"), [(1, 1), (3, 1), (4, 2), (10, 5), (30, 5)])
def test_the_reward_windows_do_not_overlap(count: int, window: int) -> None:
    reward = summarise_reward([step(n, float(n)) for n in range(count)])
    assert reward.window == window
    assert reward.first == pytest.approx((window - 1) / 2)
    assert reward.last == pytest.approx(count - 1 - (window - 1) / 2)


def test_the_failed_phase_stays(tmp_path: Path) -> None:
    recorder = Recorder(new_report(), tmp_path, Table(Console(file=io.StringIO())))
    with pytest.raises(RuntimeError), recorder.phase("job"), recorder.phase("rollout"):
        raise RuntimeError
    recorder.finish("failed", "boom")
    assert recorder.report.outcome == schema.Outcome(status="failed", phase="rollout", error="boom")


def test_the_picture_is_well_formed_and_self_contained(tmp_path: Path) -> None:
    report = msgspec.structs.replace(record(tmp_path, steps=12).report, run="<script>alert('x')</script> & co")
    page = render(report)
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"svg", "polyline", "circle"} <= tags
    assert not tags & {"script", "img", "link", "iframe"}
    assert not re.search(r"(href|src|url\()", page)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"step", "version", "reward", "ms"} <= set(texts)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_short_run_has_a_picture_too(tmp_path: Path, steps: int) -> None:
    ET.fromstring(render(record(tmp_path, steps=steps).report).removeprefix("<!DOCTYPE html>\n"))
    ET.fromstring(render(new_report()).removeprefix("<!DOCTYPE html>\n"))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.43), (0, 1234), (1, 31), (-0.3, 0.2), (0, 0), (7, 7)])
def test_ticks_enclose_the_values(low: float, high: float) -> None:
    values = ticks(low, high)
    assert values[0] <= low
    assert values[-1] >= high
    assert 2 <= len(values) <= 8
    gaps = {round(b - a, 9) for a, b in pairwise(values)}
    assert len(gaps) == 1


def test_without_a_terminal_each_step_is_one_line(tmp_path: Path) -> None:
    out = io.StringIO()
    record(tmp_path, steps=3, console=Console(file=out, width=40))
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["step", "reward", "tokens/s", "refit", "ms", "GB/s", "transport", "parity"]
    assert lines[1].split() == ["start", "-", "-", "500", "1.25", "host_fd", "1.0e-04"]
    assert lines[4].split() == ["3", "1.000", "32", "500", "1.25", "host_fd", "1.0e-04"]
    assert "\x1b" not in out.getvalue()


def test_in_a_terminal_the_last_rows_fit_and_the_end_shows_all(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=14)
    record(tmp_path, steps=20, console=console)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).rpartition("step")[2]
    assert re.findall(r"^. +(\w+) +. ", last, re.MULTILINE) == ["start", *map(str, range(1, 21))]


def test_log_lines_go_above_a_live_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stderr = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    handler = logging.StreamHandler(stderr)
    logging.getLogger().addHandler(handler)
    try:
        with Table(Console(file=terminal, force_terminal=True, width=100, height=20)):
            logging.getLogger().warning("chosen: host_fd")
        assert "chosen: host_fd" in terminal.getvalue()
        assert handler.stream is stderr
        assert stderr.getvalue() == ""
    finally:
        logging.getLogger().removeHandler(handler)


def test_several_engines_share_a_row_that_shows_the_slowest_and_the_worst(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=40)
    report = msgspec.structs.replace(
        new_report(), engines=[schema.EngineInfo(name=f"engine-{n}", address=f"tcp://engine-{n}:7000") for n in (0, 1)]
    )
    with Table(console) as table:
        recorder = Recorder(report, tmp_path, table)
        recorder.engine(1, "engine-1", "0.32.0")
        for version in (1, 2):
            pair = [refit(version), msgspec.structs.replace(refit(version, seconds=0.75), engine="engine-1")]
            recorder.refit(pair, {"engine-0": Parity(max_abs_dlogprob=2e-4), "engine-1": Parity(max_abs_dlogprob=1e-4)})
            recorder.step(step(version))
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["start", "-", "-", "750", "1.25", "host_fd", "2.0e-04"]
    assert [line.split()[0] for line in lines[1:]] == ["start", "1"]
    assert [each.version for each in recorder.report.engines] == [None, "0.32.0"]
    late = [*recorder.report.refits[:-1], msgspec.structs.replace(recorder.report.refits[-1], back_after_s=41.23)]
    recovered = summary(msgspec.structs.replace(recorder.report, refits=late), "out/report.json")
    assert "recovery  engine-1 with version 2 after 41.2 s" in recovered
    assert "recovery" not in summary(recorder.report, "out/report.json")
    assert "4 into 2 engines by host_fd" in summary(recorder.report, "out/report.json")
    assert "engine-1 0.32.0 at tcp://engine-1:7000" in render(recorder.report)


def test_the_summary_names_what_matters(tmp_path: Path) -> None:
    text = summary(record(tmp_path, steps=10).report, "out/report.json")
    assert "0.300 -> 0.800" in text
    assert "11 by host_fd" in text
    assert "equal in 11 of 11" in text
    assert "1.0e-04" in text
    assert text.endswith("out/report.json")
