"""Whether a refit was as fast as its trial, and what is said when it was not."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client import CollectorRegistry

from syncstack import ModuleSource, RefitReport
from syncstack.facts.cgroup import throttled_s
from syncstack.refit.metrics import Metrics
from syncstack.refit.pace import TOLD_BYTES, ClockedSource, Stage, why_slow
from syncstack.refit.trial import Rate

RATE = Rate(first=1e9, again=4e9)
GB = 10**9
V1, V2 = "1 1 0:1 / /cpu rw - cgroup cgroup rw,cpu,cpuacct", "1 1 0:1 / /cg rw - cgroup2 cgroup2 rw"
USUAL = Stage(bytes=GB, seconds=0.25, first=False, source_s=0.01, worker_s=0.1, cast_bytes=0, throttled_s=0.0)


def stage(**fields: Any) -> Stage:
    return msgspec.structs.replace(USUAL, **fields)


@pytest.mark.parametrize(
    ("seconds", "first", "slow"), [(0.25, False, False), (0.49, False, False), (0.51, False, True), (0.51, True, False)]
)
def test_less_than_half_of_the_trials_rate_is_slow_and_a_first_version_has_a_rate_of_its_own(
    seconds: float, first: bool, slow: bool
) -> None:
    assert bool(why_slow(RATE, stage(seconds=seconds, first=first))) is slow


def test_a_version_of_a_few_pages_is_never_called_slow() -> None:
    assert why_slow(RATE, stage(bytes=TOLD_BYTES - 1, seconds=9.0)) == ""
    assert why_slow(RATE, stage(bytes=TOLD_BYTES, seconds=9.0))


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"throttled_s": 0.5}, "kept off its processors for 0.50 s: raise its CPU limit"),
        ({"source_s": 0.9}, "the weight source took 0.90 s of 1.00 s"),
        ({"worker_s": 0.8}, "the engine's worker took 0.80 s of 1.00 s to verify"),
        ({"cast_bytes": GB}, "1000 MB were cast on the way"),
        ({"unpinned": "no bindings"}, "memory that is not page-locked: no bindings"),
        ({}, "other processes use the memory"),
        ({"throttled_s": 0.5, "source_s": 0.9, "worker_s": 0.8}, "raise its CPU limit"),
    ],
)
def test_the_likely_cause_is_named_with_its_numbers(fields: dict[str, Any], cause: str) -> None:
    text = why_slow(RATE, stage(seconds=1.0, **fields))
    assert text.startswith("1.00 GB/s where a trial reached 4.00: ")
    assert cause in text


def test_a_source_is_clocked_and_changed_in_nothing() -> None:
    module = torch.nn.Linear(3, 2)
    source = ClockedSource(ModuleSource(module))
    assert [name for name, _ in source] == ["weight", "bias"]
    assert source.metadata() == ModuleSource(module).metadata()
    assert source.seconds > 0
    assert dict(ClockedSource(ModuleSource(module)))["weight"].data_ptr() == module.weight.data_ptr()


class Gathered(ModuleSource):
    """Counts what it gives, as one that gathers would have to."""

    given = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in super().__iter__():
            self.given += 1
            yield pair


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_a_whole_source_is_gone_through_however_the_stage_ends(taken: int, fails: bool) -> None:
    inner = Gathered(torch.nn.Linear(3, 2))
    with contextlib.suppress(KeyError), ClockedSource(inner, whole=True) as source:
        for _ in itertools.islice(source, taken):
            pass
        if fails:
            raise KeyError("a stage that failed")
    assert inner.given == 2


def test_a_source_that_is_not_shared_is_asked_no_more_than_the_stage_asks() -> None:
    inner = Gathered(torch.nn.Linear(3, 2))
    with ClockedSource(inner) as source:
        next(iter(source))
    assert inner.given == 1


def test_the_metrics_tell_slow_from_served() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    report = RefitReport(
        version=1, engine="engine-0", transport="host_fd", why_not={}, bytes=GB, tensors=1, seconds=2.0,
        transport_seconds=0.5, paused_seconds=1.0, gb_per_s=2.0, expected_gb_per_s=4.5, phases={}, digests_equal=1,
    )  # fmt: skip
    metrics.count(report)
    metrics.count(msgspec.structs.replace(report, slow="1.00 GB/s where a trial reached 4.00: cast"))
    labels = {"engine": "engine-0", "transport": "host_fd"}
    found = {
        name: registry.get_sample_value(f"syncstack_{name}", labels)
        for name in ("refits_slow_total", "refit_seconds_count", "refit_bytes_per_second")
    }
    assert found == {"refits_slow_total": 1.0, "refit_seconds_count": 2.0, "refit_bytes_per_second": 2e9}
    assert registry.get_sample_value("syncstack_refit_expected_bytes_per_second", labels) == 4.5e9


@pytest.mark.parametrize(
    ("cgroup", "mount", "file", "text", "seconds"),
    [
        ("0::/a", V2, "cg/a/cpu.stat", "usage_usec 9\nthrottled_usec 2500000", 2.5),
        ("3:cpu,cpuacct:/a", V1, "cpu/a/cpu.stat", "throttled_time 5", 5e-9),
        ("0::/a", V2, "cg/a/cpu.max", "max", 0.0),
    ],
)
def test_the_time_that_a_cpu_limit_took_is_read_from_either_version(
    tmp_path: Path, cgroup: str, mount: str, file: str, text: str, seconds: float
) -> None:
    for name, content in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mount, file: text}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert throttled_s(tmp_path) == seconds
