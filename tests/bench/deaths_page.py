"""Writes the part of docs/reliability.md about killed engines: time until noticed, time until training goes on."""

from __future__ import annotations

from typing import Any

MEDIAN, LATEST = 1.0, 3.0  # seconds: required of the median, quiet, and of the 95th percentile, busy
ABOUT = """Labs of four ranks lose them one after the other until one is left; strategy, victim and moment are drawn
(`python -m tests.deaths`). Noticed is when a note of the lab says so; a kill is survived if all who are left end a new
step. The load is the average of the last five minutes, at the end;
what the ranks themselves do is in it.
"""


def section(each: list[dict[str, Any]]) -> str:
    """Returns a row for each series of kills, and whether it met the requirement."""
    lines = ["| ranks hold | beside two that spin | kills | survived | noticed (s: median, 95th percentile, worst) | "
             "all go on (s) | load |", "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
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
    return f"- {where}: noticed within {most:g} s is asked of the {words}, {took:.2f} s: {kept}."
