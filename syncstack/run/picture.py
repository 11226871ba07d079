"""The run as one HTML page: reward and refit time over steps, as inline SVG. No script, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from statistics import median

from syncstack.run.schema import RunReport

WIDTH, HEIGHT = 860, 270
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 16, 46
INK, GRID, REWARD, REFIT = "#1f2430", "#d9dce3", "#1a7f5a", "#2f5fb3"

PAGE = """<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en">
<head><meta charset="utf-8"/><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; color: {ink}; background: #fff;
  max-width: 900px; margin: 24px auto; padding: 0 16px; }}
h1 {{ font-size: 20px; margin: 0 0 4px; }} h2 {{ font-size: 15px; margin: 22px 0 4px; }}
svg {{ width: 100%; height: auto; }} svg text {{ font-size: 12px; fill: {ink}; }}
table {{ border-collapse: collapse; margin-top: 18px; }}
td {{ padding: 2px 18px 2px 0; vertical-align: top; }} td:first-child {{ color: #5a6172; white-space: nowrap; }}
</style></head>
<body>
<h1>{title}</h1>
<p>{headline}</p>
{charts}
<table>
{rows}
</table>
</body></html>
"""


def render(report: RunReport) -> str:
    """The page. Well-formed XML, whatever the names in the report hold."""
    charts = []
    if report.steps:
        points = [(float(s.step), s.reward) for s in report.steps]
        charts.append("<h2>Mean reward of each step</h2>\n" + chart(points, "step", "reward", REWARD))
    if report.refits:
        name = report.refits[0].engine
        points = [(float(r.version), r.seconds * 1000) for r in report.refits if r.engine == name]
        charts.append("<h2>Time of each refit, begin to resume</h2>\n" + chart(points, "version", "ms", REFIT))
    rows = "\n".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in _rows(report))
    return PAGE.format(
        title=escape(f"syncstack run {report.run}"),
        headline=escape(_headline(report)),
        charts="\n".join(charts),
        rows=rows,
        ink=INK,
    )


def chart(points: Sequence[tuple[float, float]], x_label: str, y_label: str, colour: str) -> str:
    """A line with dots over labelled axes that start at 0 on the y side. ``points`` are sorted by x, at least one."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks = [tick for tick in ticks(min(xs), max(xs)) if tick == int(tick)]
    y_ticks = ticks(min(0.0, *ys), max(ys) or 1.0)
    x_low, x_high = min(xs), max(*xs, min(xs) + 1)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def py(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in y_ticks:
        y = py(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in (t for t in x_ticks if x_low <= t <= x_high):
        x = px(tick)
        parts.append(f'<line x1="{x}" y1="{HEIGHT - BOTTOM}" x2="{x}" y2="{HEIGHT - BOTTOM + 5}" stroke="{INK}"/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 19}" text-anchor="middle">{tick:g}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="{INK}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    half = (TOP + base) / 2
    parts.append(
        f'<text x="16" y="{half}" text-anchor="middle" transform="rotate(-90 16 {half})">{escape(y_label)}</text>'
    )
    line = " ".join(f"{px(x)},{py(y)}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts += [f'<circle cx="{px(x)}" cy="{py(y)}" r="3" fill="{colour}"/>' for x, y in points]
    return "\n".join([*parts, "</svg>"])


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that enclose ``low`` to ``high``; at least two."""
    span = high - low or 1.0
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def _headline(report: RunReport) -> str:
    parts = []
    if report.reward.first is not None and report.reward.last is not None:
        parts.append(f"Reward {report.reward.first:.3f} to {report.reward.last:.3f} in {len(report.steps)} steps")
    if report.refits:
        parts.append(f"{len(report.refits)} refits, median {median(r.seconds for r in report.refits) * 1000:.0f} ms")
    parts.append(f"outcome: {report.outcome.status}")
    return "; ".join(parts) + "."


def _rows(report: RunReport) -> list[tuple[str, str]]:
    size = f"{report.model.parameters / 1e6:.0f} M parameters, {report.model.bytes / 1e6:.0f} MB"
    rows = [
        ("model", f"{report.model.name}: {size}, {report.model.dtype}"),
        *(("engine", f"{each.name} {each.version or ''} at {each.address}") for each in report.engines),
        ("layout, profile", f"{report.layout}, {report.profile}; pidfd_getfd {report.facts.pidfd_getfd}"),
        ("started, finished", f"{report.started}, {report.finished or '-'}"),
    ]
    if report.refits:
        last = report.refits[-1]
        why = "; ".join(f"not {name}: {reason}" for name, reason in last.why_not.items())
        rows.append(("transport", f"{last.transport}, median {median(r.gb_per_s for r in report.refits):.2f} GB/s"))
        rows.append(("why", why or "the best there is"))
        equal = sum(r.digests_equal for r in report.refits)
        rows.append(("digests", f"all {last.digests_compared} tensors equal in {equal} of {len(report.refits)} refits"))
    checked = [r.max_abs_dlogprob for r in report.refits if r.max_abs_dlogprob is not None]
    if checked:
        tolerance = report.refits[-1].parity_tolerance
        rows.append(("parity", f"largest |dlogprob| {max(checked):.2e}, tolerance {tolerance}"))
    if report.outcome.error:
        rows.append(("error", f"in {report.outcome.phase}: {report.outcome.error}"))
    return rows
