"""Requests without effect: an unmet pace, an idle fault."""

from __future__ import annotations

import json

from workbench.analysis.steps.words import format_seconds
from workbench.record.timeline import Timeline


def list_unheeded(timeline: Timeline) -> list[str]:
    """Returns a sentence for each present one. Hosts mark begin and end."""
    rows = timeline.marks.rows()
    rows = rows[rows.equal("name", "pace") | rows.equal("name", "no effect")]
    late: dict[int, tuple[float, float]] = {}  # by rank: seconds of compute, and target
    idle: list[str] = []
    for rank, name, detail in zip(rows.rank.tolist(), rows.name, rows.detail, strict=True):
        said = json.loads(detail)
        if name == "no effect":
            idle = said["texts"]
        elif said["met"] or not said.keys() >= {"takes_ms", "asked_ms"}:
            late.pop(rank, None)
        else:
            late[rank] = said["takes_ms"] * 1e-3, said["asked_ms"] * 1e-3
    return ([_describe_pace(late)] if late else []) + idle


def _describe_pace(late: dict[int, tuple[float, float]]) -> str:
    worst = max(late, key=lambda rank: late[rank][0])
    takes, asked = late[worst]
    more = len(late) - 1
    others = "" if not more else ", and 1 more rank misses it" if more == 1 else f", and {more} more ranks miss it"
    return (
        f"Pace not met: compute takes {format_seconds(takes)} on rank {worst}, the pace asks for "
        f"{format_seconds(asked)}{others}. "
        "Set a longer pace or fewer ranks. Until then a fault slows the real compute, not the pace."
    )
