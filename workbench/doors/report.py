"""A run as one self-contained page, drawn by whoever offers to; nothing is drawn here."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from workbench.record.run import Run, RunError


def write_page(run: Run, path: Path | str) -> Path:
    """Writes `run` as a self-contained HTML page at `path`."""
    for entry in entry_points(group="workbench.display", name="report"):
        entry.load()(run, Path(path))
        return Path(path)
    raise RunError(f"{path}: nothing here can draw a page; install training-workbench with its widgets")
