"""Run checks over facts, and sum them up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from syncstack.doctor.checks import CHECKS
from syncstack.doctor.model import Check, Finding, Outcome, Status
from syncstack.errors import UsageError
from syncstack.facts import Facts


def select(only: Sequence[str]) -> tuple[Check, ...]:
    """Return the checks named in ``only``, all of them for none; ``UsageError`` for an unknown id."""
    known = {check.id for check in CHECKS}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UsageError(
            "unknown check",
            observed=", ".join(unknown),
            expected="an id from the list",
            next_step="syncstack doctor --list",
        )
    return tuple(check for check in CHECKS if not only or check.id in only)


def _outcome(check: Check, status: Status, finding: Finding) -> Outcome:
    bad = status in ("warn", "fail")
    return Outcome(
        id=check.id,
        assertion=check.assertion,
        status=status,
        observed=finding.observed,
        consequence=finding.consequence if bad else "",
        remedy=finding.remedy if bad else "",
        hint=check.hint,
    )


def examine(facts: Facts, checks: Iterable[Check] = CHECKS) -> tuple[Outcome, ...]:
    """Return one outcome per check, in order. A check that crashes is an outcome too, and never hides the others."""
    outcomes = []
    for check in checks:
        try:
            finding = check.find(facts)
        except Exception as error:  # noqa: BLE001 - the bug of one check must not cost the others
            crash = Finding(holds=False, observed=f"the check did not complete: {type(error).__name__}: {error}")
            outcomes.append(_outcome(check, "crashed", crash))
            continue
        status: Status = "skip" if finding.holds is None else "pass" if finding.holds else check.severity
        outcomes.append(_outcome(check, status, finding))
    return tuple(outcomes)


def host_transport(facts: Facts) -> tuple[bool, str]:
    """Return whether a memfd can be made here and handed to a sibling, and if not, why."""
    memfd, folder = facts.syscalls["memfd_create"], facts.socket_dir
    if memfd.verdict != "ok":
        return False, memfd.evidence
    if folder is None or not folder.writable:
        return False, folder.evidence if folder is not None else "no socket folder"
    if facts.in_container and not folder.mounted:
        return False, f"{folder.path} is not shared with any other container"
    return True, ""


def summary(facts: Facts, outcomes: Sequence[Outcome]) -> str:
    """Return the one line at the end."""
    available, reason = host_transport(facts)
    parts = ["zero-copy host transport available" if available else f"no zero-copy host transport ({reason})"]
    parts.append(f"GPU: {facts.gpu.count or 'none'}")
    for status, one, many in (
        ("fail", "failure", "failures"),
        ("crashed", "crashed check", "crashed checks"),
        ("warn", "warning", "warnings"),
    ):
        count = sum(outcome.status == status for outcome in outcomes)
        if count:
            parts.append(f"{count} {one if count == 1 else many}")
    return "; ".join(parts)


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """Return 1 when a check failed or crashed, else 0; warnings do not count."""
    return int(any(outcome.status in ("fail", "crashed") for outcome in outcomes))
