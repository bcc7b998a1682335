"""Input and output of the What-if panel."""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any

from widgets.charts import theme
from workbench.analysis.steps.words import format_seconds
from workbench.settings import KnobError

UNLIMITED = 5.0  # slider's upper end, log10 of Mbit/s: no limit
WIDE, HIGH, LEFT, LOW = 520, 190, 64, 34  # size and margins of the curve


def describe_result(found: Any, settings: dict[str, Any], network: str = "") -> str:
    """Returns the result as HTML."""
    more = "more" if found.error > 0 else "less"
    off = "the same" if abs(found.error) < 0.005 else f"{abs(found.error):.0%} {more} than measured"
    ratio = found.other / found.same
    much = "as long" if 0.995 < ratio < 1.005 else f"{ratio:.3g} × as long"
    link = network or describe_bandwidth(settings["link.bandwidth"])
    latency = f", {settings['link.latency']:g} ms" if settings.get("link.latency") else ""
    ranks = f"{settings['ranks']} rank{'s' * (settings['ranks'] != 1)}"
    rest = "".join(f", {path.rsplit('.', 1)[-1]} {value}" for path, value in settings.items()
                   if path not in ("ranks", "link.bandwidth", "link.latency"))  # fmt: skip
    return (
        f"<p>The present step: <b>{format_seconds(found.measured)}</b> measured, "
        f"<b>{format_seconds(found.same)}</b> simulated ({off}).<br>"
        f"With {ranks}, {escape(link)}{latency}{escape(rest)}: "
        f"<b>{format_seconds(found.other)}</b> per step, "
        f"{much}; {found.sent / 1e6:.3g} MB sent per step and rank. Its timeline:</p>"
    )


def list_assumptions(sentences: tuple[str, ...]) -> str:
    """Returns the assumptions as an HTML list."""
    return "<b>Assumed</b><ul>" + "".join(f"<li>{escape(s)}</li>" for s in sentences) + "</ul>" if sentences else ""


def slider_bandwidth(position: float) -> float:
    """Returns a position's Mbit/s; 0 (unlimited) at the upper end."""
    return 0.0 if position >= UNLIMITED else float(f"{10**position:.3g}")


def slider_position(bandwidth: float) -> float:
    """Returns the slider's position for Mbit/s."""
    return min(max(math.log10(bandwidth), 0.0), UNLIMITED) if bandwidth else UNLIMITED


def describe_bandwidth(bandwidth: float) -> str:
    """Returns a bandwidth in words."""
    return f"{bandwidth:g} Mbit/s" if bandwidth else "unlimited: this machine's own speed"


def parse_settings(text: str) -> dict[str, Any]:
    """Parses typed settings: `strategy.every=16, partition.stages=4`. Raises KnobError.

    >>> parse_settings("strategy.every=16, order=fifo")
    {'strategy.every': 16, 'order': 'fifo'}
    """
    found = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        path, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not path:
            raise KnobError(f"{part}: must be path=value, such as strategy.every=16")
        try:
            found[path] = json.loads(value)
        except json.JSONDecodeError:
            found[path] = value
    return found


def draw_curve(rows: list[Any]) -> str:
    """Draws seconds per step over ranks (both logarithmic), with the share of compute."""
    told = [row for row in rows if not row.refused]
    refused = "".join(f"<p>{row.ranks:,} ranks: {escape(row.refused)}</p>" for row in rows if row.refused)[:1200]
    if not told:
        return refused
    x0, x1 = (math.log2(end) for end in (told[0].ranks, max(told[-1].ranks, told[0].ranks * 2)))
    ends = [math.log10(min(r.seconds for r in told)), math.log10(max(r.seconds for r in told))]
    low, high = (ends[0] - 0.1, max(ends[1], ends[0] + 0.3) + 0.1)

    def at(row: Any) -> tuple[float, float]:
        x = LEFT + (WIDE - LEFT - 24) * (math.log2(row.ranks) - x0) / (x1 - x0)
        return x, 16 + (HIGH - LOW - 16) * (high - math.log10(row.seconds)) / (high - low)

    dots, line = [], " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, told))
    for row in told:
        x, y = at(row)
        title = f"{row.ranks:,} ranks: {format_seconds(row.seconds)} per step, {row.computing:.0%} of it computing"
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{theme.BLUE}"><title>{title}</title></circle>'
                    f'<text x="{x:.1f}" y="{HIGH - 18}" text-anchor="middle">{row.ranks}</text>'
                    f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{row.computing:.0%}</text>')  # fmt: skip
    marks = [f'<text x="{LEFT - 8}" y="{at(row)[1] + 4:.1f}" text-anchor="end">{format_seconds(row.seconds)}</text>'
             for row in {r.seconds: r for r in (told[0], max(told, key=lambda r: r.seconds))}.values()]  # fmt: skip
    return (
        f'<svg width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" role="img" font-size="11" '
        f'fill="currentColor" style="max-width: 100%" aria-label="seconds per step over ranks">'
        f'<polyline points="{line}" fill="none" stroke="{theme.BLUE}" stroke-width="2"/>{"".join(dots)}{"".join(marks)}'
        f'<text x="{WIDE / 2}" y="{HIGH - 2}" text-anchor="middle">ranks; time of a step, % of it computing</text>'
        f"</svg>{refused}"
    )
