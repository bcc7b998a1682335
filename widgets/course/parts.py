"""The script, the style sheet and the teacher's page of a hand-out, as files of this folder."""

from __future__ import annotations

from pathlib import Path


def read_part(name: str) -> str:
    """Returns a file's text. Raises OSError."""
    return Path(__file__).with_name(name).read_text("utf8")
