"""Compares recorded runs, or segments of them, on the command line."""

from __future__ import annotations

from pathlib import Path

from workbench import analysis
from workbench.analysis.compare.comparison import ALIKE, BETTER, UNKNOWN, WORSE, Compared
from workbench.entrypoints.report import write_page
from workbench.record.run import Run, RunError


def select_rows(rows: list[Compared], metric: str | None) -> list[Compared]:
    """Returns the rows whose names begin with `metric` (None: all rows). Raises RunError if none does."""
    found = [row for row in rows if metric is None or row.metric.startswith(metric)]
    if not found:
        raise RunError(f"--metric {metric}: must be the beginning of one of {', '.join(row.metric for row in rows)}")
    return found


def print_comparison(a: Run, b: Run, metric: str | None, tolerance: float, out: Path | None) -> bool:
    """Prints the comparison, writes its page and returns whether `b` is worse.

    Raises RunError if no metric has a verdict.
    """
    rows = select_rows(analysis.compare_runs(a, b, tolerance), metric)
    print(f"a  {a!r}\nb  {b!r}")
    for text in analysis.list_differences(a, b):
        print(f"   {text}")
    print(format_table(rows))
    if out:
        a.beside = b
        print(f"wrote {write_page(a, out)}")
    if all(row.verdict == UNKNOWN for row in rows):
        raise RunError(f"no verdict on b: {rows[0].why}")
    return any(row.verdict == WORSE for row in rows)


def format_table(rows: list[Compared]) -> str:
    """Returns the rows as text; less is better."""
    lines = [f"{'':<25} {'a':>11} {'b':>11} {'b - a':>11}  {'99 % interval':<25} b is"]
    for row in rows:
        interval = "" if row.verdict == UNKNOWN else f"[{row.low:+.3g}, {row.high:+.3g}]"
        verdict = {WORSE: "WORSE", BETTER: "better", ALIKE: "alike"}.get(row.verdict, f"unknown ({row.why})")
        name = f"{row.metric} ({row.unit})" if row.unit == "s" else row.metric
        lines.append(f"{name:<25} {row.a:>11.5g} {row.b:>11.5g} {row.difference:>+11.3g}  {interval:<25} {verdict}")
    return "\n".join(lines)
