"""The scripts and style sheets of the page, as files of this folder."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def read_static(*names: str) -> str:
    """Returns the text of these files, one after the other. Raises OSError if one cannot be read."""
    return "".join((_HERE / name).read_text("utf8") for name in names)
