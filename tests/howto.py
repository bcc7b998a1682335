"""Applies the steps of CONTRIBUTING.md to a copy of the project, as a reader would.

    python -m tests.howto FOLDER [SECTION ...]

Markers in the page name each step. The code block after a marker is the text:

    <!-- file PATH -->                  a new file
    <!-- insert PATH below: TEXT -->    lines below the one line of PATH that contains TEXT
    <!-- try -->                        a program that the reader runs
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("workbench", "widgets", "tests", "pyproject.toml")
STEP = re.compile(r"<!-- (file|insert|try)(?: (\S+?))?(?: below: (.+?))? -->\n```python\n(.*?)```", re.S)


def section(title: str) -> str:
    """Returns the text of a section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    return str(found)


def copy_project(folder: Path) -> None:
    """Copies the packages and their tests into `folder`."""
    for part in COPIED:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / part, folder / part)


def apply_steps(title: str, folder: Path) -> list[str]:
    """Makes a section's files and insertions in `folder`. Returns its programs.

    Raises ValueError if not exactly one line contains the text of an insertion.
    """
    programs = []
    for kind, path, below, text in STEP.findall(section(title)):
        if kind == "try":
            programs.append(text)
        elif kind == "file":
            (folder / path).write_text(text)
        else:
            insert(folder / path, below, text)
    return programs


def insert(path: Path, below: str, text: str) -> None:
    """Inserts `text` below the line that contains `below`."""
    lines = path.read_text().splitlines(keepends=True)
    at = [number for number, line in enumerate(lines, 1) if below in line]
    if len(at) != 1:
        raise ValueError(f"{path.name}: {len(at)} lines contain {below!r}; CONTRIBUTING.md must name one")
    path.write_text("".join([*lines[: at[0]], text, *lines[at[0] :]]))


def main(folder: str, *titles: str) -> None:
    Path(folder).mkdir(parents=True)
    copy_project(Path(folder))
    for title in titles:
        apply_steps(title, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
