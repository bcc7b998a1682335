"""The page's scripts and style sheets, as files of this folder."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def read_static(*names: str) -> str:
    """Returns these files' text, one after the other. Raises OSError."""
    return "".join((_HERE / name).read_text("utf8") for name in names)
