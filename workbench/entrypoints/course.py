"""Makes hand-outs of the lessons for a class and marks what students hand in. An entry point does the work."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from workbench.entrypoints.jupyter import locate_notebooks
from workbench.record.run import RunError

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins so


def export_course(lessons: Sequence[str], to: Path, slides: bool, notebooks: Path | None = None) -> list[Path]:
    """Writes lessons, slides, answers and a page for the teacher into `to`. Returns the files.

    lessons:   numbers of lessons; none: all lessons
    notebooks: a folder with notebooks in place of the installed ones

    Raises RunError for an unknown lesson, for a folder with content and without nbconvert.
    """
    files: list[Path] = _load("handout")(notebooks or locate_notebooks(), lessons, to, slides)
    return files


def mark_course(folder: Path, answers: Path | None, out: Path | None) -> str:
    """Returns the table of marks and notes on it as text. Writes the table to `out` as CSV, if given.

    Raises RunError for a folder without worksheets and for a file that is not a hand-out's answers.
    """
    marks = _load("marks")(folder, answers)
    lines = [marks.table.to_string(), *marks.notes]
    if out:
        safe = marks.table.rename(index=_escape, columns=_escape)
        try:
            safe.to_csv(out)
        except OSError as error:
            raise RunError(f"{out}: cannot be written ({error.strerror}); choose another place") from error
        lines.append(f"wrote {out}")
    return "\n".join(lines)


def _escape(name: str) -> str:
    """Returns a student's name such that a spreadsheet shows it and does not run it."""
    return f"'{name}" if name.startswith(FORMULA_SIGNS) else name


def _load(name: str) -> Any:
    for entry in entry_points(group="workbench.display", name=name):
        return entry.load()
    raise RunError("the package for teachers is missing; install training-workbench again, with its widgets")
