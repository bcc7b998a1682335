"""Writes a run as a small HTML table, for saved notebooks and pages without widgets."""

from __future__ import annotations

from html import escape
from typing import Any

from workbench.analysis import summary


def table(run: Any) -> str:
    """Returns the summary of a run as an HTML table with 2 columns."""
    rows = "".join(f"<tr>{_cell('th', str(k))}{_cell('td', _text(v))}</tr>" for k, v in summary(run).items())
    return f"<table>{rows}</table>"


def _cell(tag: str, text: str) -> str:
    return f"<{tag} style='text-align:left'>{escape(text)}</{tag}>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    return str(value)
