"""What one refit did: the record that ``report.json``, the live table and the metrics are made from."""

from __future__ import annotations

import logging

import msgspec

log = logging.getLogger(__name__)


class RefitReport(msgspec.Struct, frozen=True, kw_only=True):
    """One version moved into one engine. Times are seconds, sizes bytes."""

    version: int
    engine: str
    transport: str
    why_not: dict[str, str]
    """For each transport that would have been better: the fact that ruled it out."""
    bytes: int
    tensors: int
    seconds: float
    """Wall time of the whole transaction, from begin to resume."""
    transport_seconds: float
    """Wall time of the bytes alone: fill, digest on both sides, hand-over, map."""
    paused_seconds: float
    """How long the engine did not serve: pause to resume."""
    gb_per_s: float
    """``bytes / transport_seconds / 1e9``."""
    expected_gb_per_s: float | None = None
    """What moving tensors like these to the same workers reached in a trial; ``slow`` is measured by it."""
    slow: str = ""
    """The likely cause where ``gb_per_s`` is below half of that, with the numbers behind it."""
    phases: dict[str, float]
    """Seconds per phase, in order: begin, stage, pause, load, verify, commit, resume."""
    digests_equal: int
    """Tensors whose digest, as read by the engine, equals the trainer's. Equal to ``tensors`` or the refit failed."""
    cast_bytes: int = 0
    """Source bytes that were cast to the engine's dtype on the way."""
    back_after_s: float = 0.0
    """For how long the engine had been left behind before this refit brought it back; 0 if it had not."""
    unchanged_since: int | None = None
    """The earlier version that has the same bytes, all of them; None where something has changed."""
    unpinned: str = ""
    """Why values of a GPU went through memory that is not page-locked, and so slower; "" where they did not."""


class Unchanged:
    """Notices a version whose bytes are those of the one before. A trainer whose optimizer does not step, or which
    sends other parameters than it trains, looks like one that learns slowly."""

    def __init__(self) -> None:
        self._manifest = ""
        self._version = 0
        self._told = False

    def since(self, manifest: str, version: int) -> int | None:
        """``manifest``: the digest of what ``version`` holds. Returns the first version that held the same without a
        change in between, if it is another one, and warns of the first that follows it."""
        if not manifest or manifest != self._manifest:
            self._manifest, self._version, self._told = manifest, version, False
        if version == self._version:
            return None
        if not self._told:
            log.warning(
                "version %d has not one byte that is not as in version %d: did the optimizer step, and is what it "
                "trains what is sent?",
                version,
                self._version,
            )
        self._told = True
        return self._version
