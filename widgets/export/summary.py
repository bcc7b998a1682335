"""Writes a run as a small HTML table, for saved notebooks and pages without widgets."""

from __future__ import annotations

from html import escape
from typing import Any

from workbench.analysis import summarise_run


def summary_table(run: Any) -> str:
    """Returns a run's summary as an HTML table with 2 columns."""
    rows = "".join(
        f"<tr>{_make_cell('th', str(k))}{_make_cell('td', _format_value(v))}</tr>"
        for k, v in summarise_run(run).items()
    )
    return f"<table>{rows}</table>"


def _make_cell(tag: str, text: str) -> str:
    return f"<{tag} style='text-align:left'>{escape(text)}</{tag}>"


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_format_value(v)}" for k, v in value.items())
    return str(value)
