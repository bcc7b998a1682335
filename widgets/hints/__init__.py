"""Hints to the lessons' exercises, the vaguest first. Each lesson has a file, so a notebook's reader sees none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.settings import KnobError, short

HERE = Path(__file__).parent


def find_hints(hints: Sequence[str] | str) -> tuple[str, ...]:
    """Returns the hints, or those of the lesson with that number. Raises KnobError for an unknown number.

    >>> find_hints(["It is even."]), len(find_hints("13"))
    (('It is even.',), 4)
    """
    if not isinstance(hints, str):
        return tuple(hints)
    files = {path.stem: path for path in HERE.glob("*.txt")}
    if hints not in files:
        raise KnobError(f"hints={short(hints)}: must be a list of sentences, or one of {', '.join(sorted(files))}")
    return tuple(files[hints].read_text("utf8").splitlines())
