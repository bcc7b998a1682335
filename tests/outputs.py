"""Stores the results of lessons in their notebooks, so that GitHub and the site show them without a kernel.

    python -m tests.outputs            # lessons whose code has changed since their outputs were stored
    python -m tests.outputs 05 08      # these lessons
    python -m tests.outputs --strip 05 # removes the outputs of these lessons

Each lesson runs from its first cell to its last with real ranks. Figures need Chromium. Run it on a quiet machine,
because readers see its times. `python -m tests.course --outputs 05` measures a lesson's duration in the same run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.course import code_of, lessons
from tests.lessons import NOTEBOOKS, execute
from tests.static_outputs import FIRST, KEY, LAST, store, strip


def is_fresh(name: str) -> bool:
    """Whether a lesson has the outputs of its present code."""
    raw = json.loads((NOTEBOOKS / name).read_text("utf8"))
    found: dict[str, Any] = raw["metadata"].get(KEY, {})
    return found.get("code") == code_of(name)


def run(name: str) -> int:
    """Executes a lesson and stores its outputs. Returns the number of cells with outputs."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        book = execute(name, Path(folder), patch, first=FIRST, last=LAST)
        return store(NOTEBOOKS / name, book, code_of(name), {folder: "."})


def remove(name: str) -> None:
    """Removes a lesson's outputs."""
    raw = strip(json.loads((NOTEBOOKS / name).read_text("utf8")))
    (NOTEBOOKS / name).write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", "utf8")


def main(asked: list[str]) -> None:
    only = [a for a in asked if not a.startswith("--")]
    for name in lessons(only):
        if "--strip" in asked:
            remove(name)
        elif only or not is_fresh(name):
            print(name, end=": ", flush=True)
            count = run(name)
            print(f"outputs of {count} cells, {(NOTEBOOKS / name).stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
