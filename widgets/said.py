"""A sentence that a notebook shows as a sentence: without quotes, and in as many lines as it has."""

from __future__ import annotations

from typing import Any


class Said(str):
    """A text; only where it is all that a cell shows it is shown without quotes."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self) if len(printer.stack) == 1 else repr(str(self)))
