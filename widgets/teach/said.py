"""A sentence that a notebook shows as a sentence: without quotes, broken between words, in as many lines as it has."""

from __future__ import annotations

from html import escape
from typing import Any


class Said(str):
    """A text; only where it is all that a cell shows it is shown without quotes."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self) if len(printer.stack) == 1 else repr(str(self)))

    def _repr_html_(self) -> str:
        """In the page's own type: JupyterLab breaks plain text in the middle of words."""
        return "<br>".join(escape(str(self), quote=False).split("\n"))
