"""Writes the part of docs/project/reliability.md about labs that open, run and close."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.cycles import RANKS, VARIANTS

ASKED = 100  # cycles
ABOUT = f"""`make cycles` opens a lab of {RANKS} ranks, makes one run and closes the lab, again and again.
{len(VARIANTS)} variants take turns. The first cycle of a call is a warm-up. After each later cycle the campaign counts
descriptors, threads, processes, files and shared memory of the kernel's process and of the machine. A cycle leaves
something if one of these counts is higher than after the warm-up.
"""


def describe(cycles: dict[str, Any]) -> str:
    """Returns the section's text."""
    rows = cycles.get("cycles", [])
    if not rows:
        return f"{ABOUT}\nNot measured yet.\n"
    leaks = [row for row in rows if row["left"]]
    missing = f" **{ASKED - len(rows)} of {ASKED} cycles are not made yet.**" if len(rows) < ASKED else ""
    counts = Counter((row["strategy"], row["end"]) for row in rows)
    grew = Counter((row["strategy"], row["end"]) for row in leaks)
    table = ["| strategy | end | cycles | left something |", "| --- | --- | --- | --- |"]
    table += [f"| {strategy} | {end} | {number} | {grew[strategy, end]} |"
              for (strategy, end), number in counts.items()]  # fmt: skip
    lines = [f"- {note}" for note in cycles.get("notes", [])]
    lines += [f"- cycle {row['cycle']}, {row['strategy']}: {row['left']}" for row in leaks]
    text = f"{len(rows)} cycles: {len(rows) - len(leaks)} left nothing, {len(leaks)} left something.{missing}\n"
    return "\n".join([ABOUT, text, *table, "", *lines, *([""] if lines else [])])
