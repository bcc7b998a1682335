"""Writes the part of docs/project/reliability.md about killed engines: time to notice and to train again."""

from __future__ import annotations

from typing import Any

MEDIAN, LATEST = 1.0, 3.0  # seconds: required of the median, quiet, and of the 95th percentile, busy
ABOUT = """A lab has four ranks. The test kills one rank after another until one is left. Strategy, victim and moment
are random (`python -m tests.deaths`). A kill counts as noticed when a note of the lab names it. A kill counts as
survived when all remaining ranks have completed a new step. The load is the average of the last five minutes,
at the end. It includes the ranks themselves.
"""


def section(each: list[dict[str, Any]]) -> str:
    """Returns a row for each series of kills, and whether it met the requirement."""
    lines = ["| ranks hold | with two busy processes | kills | survived | "
             "seconds until noticed (median, 95th percentile, worst) | "
             "seconds until all remaining ranks train (median, 95th percentile, worst) | load |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for one in each:
        parts, busy = "parts" if one["partitions"] else "the whole model", "yes" if one["busy"] else "no"
        lines.append(f"| {parts} | {busy} | {one['kills']} | {one['survived']} | {times(one, 'seen')} | "
                     f"{times(one, 'on')} | {one['load']:.0f} |")  # fmt: skip
    return "\n".join([ABOUT, *lines, "", *map(verdict, each)]) if each else f"{ABOUT}\nNot measured yet.\n"


def times(one: dict[str, Any], what: str) -> str:
    found = one.get(what, {})
    return ", ".join(f"{found[name]:.2f}" for name in ("median", "p95", "worst")) if found else ""


def verdict(one: dict[str, Any]) -> str:
    """Returns a sentence with the requirement of a series and its result."""
    name, most = ("p95", LATEST) if one["busy"] else ("median", MEDIAN)
    took, words = one["seen"][name], {"p95": "95th percentile", "median": "median"}[name]
    where = f"{'parts' if one['partitions'] else 'whole models'}, {'busy' if one['busy'] else 'quiet'}"
    kept = "kept" if took <= most else "**not kept**"
    return f"- {where}: the {words} until a kill is noticed is {took:.2f} s. The limit of {most:g} s is {kept}."
