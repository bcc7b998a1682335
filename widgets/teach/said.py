"""Text that a notebook shows without quotes, with line breaks between words."""

from __future__ import annotations

from html import escape
from typing import Any


class ShownText(str):
    """A text without quotes, if it is a cell's only output."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self) if len(printer.stack) == 1 else repr(str(self)))

    def _repr_html_(self) -> str:
        """Returns HTML, because JupyterLab breaks plain text in the middle of words."""
        return "<br>".join(escape(str(self), quote=False).split("\n"))
