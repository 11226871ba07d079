"""Run checks over facts, and sum them up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from syncstack.doctor.checks import CHECKS
from syncstack.doctor.model import Check, Finding, Outcome, Status, T, hint, skip
from syncstack.doctor.pair import PAIR_CHECKS, Pair
from syncstack.doctor.report import Report
from syncstack.doctor.ways import host_transport
from syncstack.errors import UsageError
from syncstack.facts import Facts, version_of


def select(only: Sequence[str], *, peer: bool) -> tuple[tuple[Check[Facts], ...], tuple[Check[Pair], ...]]:
    """Return the checks named in ``only``, all of them for none: of one process, and with ``peer`` of a pair.

    Raises UsageError for an unknown id, and for a pair's without ``peer``.
    """
    of_pairs = {check.id for check in PAIR_CHECKS}
    known = {check.id for check in CHECKS} | of_pairs
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UsageError(
            "unknown check",
            observed=", ".join(unknown),
            expected="an id from the list",
            next_step="syncstack doctor --list",
        )
    lonely = [name for name in only if name in of_pairs and not peer]
    if lonely:
        raise UsageError(
            "a check of two processes", observed=", ".join(lonely), next_step="name the engine with --peer"
        )
    return (
        tuple(check for check in CHECKS if not only or check.id in only),
        tuple(check for check in PAIR_CHECKS if peer and (not only or check.id in only)),
    )


def _outcome(check: Check[T], status: Status, finding: Finding) -> Outcome:
    return Outcome(
        id=check.id,
        assertion=check.assertion,
        status=status,
        observed=finding.observed,
        consequence=finding.consequence,
        remedy=finding.remedy,
        hint=hint(check.id),
    )


def _find(check: Check[T], subject: T) -> Finding:
    reason = next((reason for need in check.needs if (reason := need.lack(subject))), "")
    return skip(reason) if reason else check.find(subject)


def examine(subject: T, checks: Iterable[Check[T]]) -> tuple[Outcome, ...]:
    """Return one outcome per check, in order. A check that crashes is an outcome too, and never hides the others."""
    outcomes = []
    for check in checks:
        try:
            finding = _find(check, subject)
        except Exception as error:  # noqa: BLE001 - the bug of one check must not cost the others
            crash = skip(f"the check did not complete: {type(error).__name__}: {error}")
            outcomes.append(_outcome(check, "crashed", crash))
            continue
        bad = finding.severity or check.severity
        outcomes.append(_outcome(check, "skip" if finding.holds is None else "pass" if finding.holds else bad, finding))
    return tuple(outcomes)


def summary(facts: Facts, outcomes: Sequence[Outcome]) -> str:
    """Return the one line at the end."""
    available, why = host_transport(facts)
    detail = f" ({why})" if why else ""
    parts = [("zero-copy host transport available" if available else "no zero-copy host transport") + detail]
    gpu = facts.gpu
    unusable = gpu.count and gpu.problem and not gpu.devices
    parts.append(f"GPU: none usable of {gpu.count}" if unusable else f"GPU: {gpu.count or 'none'}")
    for status, one, many in (
        ("fail", "failure", "failures"),
        ("crashed", "crashed check", "crashed checks"),
        ("warn", "warning", "warnings"),
    ):
        count = sum(outcome.status == status for outcome in outcomes)
        if count:
            parts.append(f"{count} {one if count == 1 else many}")
    return "; ".join(parts)


def diagnose(facts: Facts, checks: Sequence[Check[Facts]] = CHECKS) -> Report:
    """Return what ``checks`` make of one process's facts."""
    outcomes = examine(facts, checks)
    package = version_of("syncstack") or "not installed"
    return Report(summary=summary(facts, outcomes), package=package, checks=outcomes, facts=facts)


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """Return 1 when a check failed or crashed, else 0; warnings do not count."""
    return int(any(outcome.status in ("fail", "crashed") for outcome in outcomes))
