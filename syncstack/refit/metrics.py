"""What a trainer's refits look like from outside, as Prometheus metrics of the process's own registry.

The process that imports syncstack decides whether it exposes them; ``syncstack run --metrics`` does.
"""

from __future__ import annotations

import functools

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import REGISTRY

from syncstack.refit.report import RefitReport

_LABELS = ("engine", "transport")


class Metrics:
    """The metrics of one registry. Counting is safe from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "syncstack_refit_seconds", "Whole refits that were served afterwards", _LABELS, registry=registry
        )
        self.rate = Gauge(
            "syncstack_refit_bytes_per_second", "Rate of the last refit's bytes alone", _LABELS, registry=registry
        )
        self.expected = Gauge(
            "syncstack_refit_expected_bytes_per_second",
            "What the trial of the pair measured",
            _LABELS,
            registry=registry,
        )
        self.slow = Counter(
            "syncstack_refits_slow", "Refits below half of the expected rate", _LABELS, registry=registry
        )
        self.failed = Counter("syncstack_refits_failed", "Refits that failed, by phase", ("phase",), registry=registry)
        self.engines = Gauge("syncstack_engines", "Engines that take part in the refits", registry=registry)
        self.fallbacks = Counter(
            "syncstack_transport_refused", "Transports that a trial refused", ("transport",), registry=registry
        )

    def count(self, report: RefitReport) -> None:
        """Count one refit."""
        labels = {"engine": report.engine, "transport": report.transport}
        self.seconds.labels(**labels).observe(report.seconds)
        self.rate.labels(**labels).set(report.gb_per_s * 1e9)
        if report.expected_gb_per_s is not None:
            self.expected.labels(**labels).set(report.expected_gb_per_s * 1e9)
        if report.slow:
            self.slow.labels(**labels).inc()


@functools.lru_cache(maxsize=1)
def metrics() -> Metrics:
    """Those of the process; registered on the first call."""
    return Metrics(REGISTRY)
