"""What the commands print for people, line by line; the same facts as with ``-o json``."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from syncstack.seccomp.check import Report
from syncstack.seccomp.diff import Comparison
from syncstack.seccomp.explain import Explanation
from syncstack.seccomp.record import Recording, Used, refusals


def _circumstances(caps: Sequence[str], kernel: str) -> str:
    return f"capabilities: {' '.join(caps) or 'none'}; kernel: {kernel or 'this one'}"


def report(found: Report) -> Iterator[str]:
    """Yield the lines of a check."""
    yield f"{found.profile} ({_circumstances(found.caps, found.kernel)}; libseccomp {found.libseccomp})"
    for reading in found.readings:
        yield f"{reading.runtime}: {'fine' if reading.ok else 'NOT FINE'}"
        for finding in reading.findings:
            calls = f"{' '.join(finding.calls)}: " if finding.calls else ""
            yield f"  {finding.level.upper() if finding.level == 'fail' else finding.level:4} {calls}{finding.text}"


def explanation(found: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation."""
    width = max(map(len, [*found.answers, "restrictive"])) + 1
    for profile, answer in found.answers.items():
        yield f"{profile:{width}}{answer}"
    yield f"{'why':{width}}{found.why}"
    for who, without in found.needed_by.items():
        yield f"{'needed by':{width}}{who}. Without: {without}"
    for danger in found.dangers:
        yield f"{'danger':{width}}{danger}"
    for change in found.history:
        yield f"{'history':{width}}Docker {change}"


def comparison(found: Comparison) -> Iterator[str]:
    """Yield the lines of a comparison: a column for each profile."""
    rows = [(f"{d.call}({d.args})" if d.args else d.call, d.first, d.second) for d in found.differences]
    table = [("", found.first, found.second), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    if rows:
        yield from (f"{call:{widths[0]}}  {first:{widths[1]}}  {second}" for call, first, second in table)
    yield f"{len(rows)} differences, {found.same} calls alike ({_circumstances(found.caps, found.kernel)})"


def _errors(used: Used) -> str:
    return " ".join(f"{name}:{times}" for name, times in sorted(used.errors.items()))


def _ending(found: Recording) -> str:
    if found.exit is None:
        return "ended at the deadline"
    if found.exit >= 0:
        return f"exit {found.exit}"
    return f"ended by {signal.Signals(-found.exit).name} in {found.ended_in or 'its own code'}"


def recording(found: Recording) -> Iterator[str]:
    """Yield the lines of a recording: the calls by count, then what was refused."""
    total, width = sum(used.calls for used in found.calls), max((len(used.name) for used in found.calls), default=0)
    yield f"{total} calls of {len(found.calls)} kinds in {found.seconds:.2f} s; {_ending(found)}"
    for used in found.calls:
        yield f"  {used.calls:8} {used.name:{width}} {_errors(used)}".rstrip()
    refused = refusals(found)
    by = f"by {found.profile}" if found.profile else "(EPERM or ENOSYS), by a filter or by the kernel itself"
    yield f"refused {by}: {'' if refused else 'nothing'}".rstrip()
    for used in refused:
        yield f"  {used.refused or used.calls:8} {used.name:{width}} {_errors(used)}".rstrip()
    if found.unusual:
        yield f"with arguments that our profiles refuse: {' '.join(found.unusual)}"
