"""Measures how long each lesson's cells run next to 2 spinning processes, and notes it in the lesson.

    python -m tests.course            # lessons that have changed since they were measured
    python -m tests.course 05 08      # these lessons
    python -m tests.course --write    # measures nothing
    python -m tests.course --outputs 05  # also stores the outputs of this run in the notebook (tests/outputs.py)

A lesson runs as by *Run All* with open predictions. Time for reading and trying is not included; the teacher's page has
the minutes of a lesson.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.lessons import NOTEBOOKS, execute
from tests.static_outputs import FIRST, LAST, store

DATA = Path(__file__).parents[1] / "docs" / "data" / "course.json"
HEAD = re.compile(r"^\*Its cells run [^\n]*\*\n\n", re.MULTILINE)
SPINNING = 2


def lessons(asked: list[str]) -> list[str]:
    """Returns notebooks whose names begin with these letters; all without letters."""
    names = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
    return [name for name in names if not asked or any(name.startswith(a) for a in asked)]


def code_of(name: str) -> str:
    """Returns a hash of a lesson's code that depends neither on its layout nor on the sentences that it shows.

    A sentence is a string with a space in it; a query, which has ==, is code.
    """
    cells = nbformat.read(NOTEBOOKS / name, as_version=4).cells
    tree = ast.parse("\n".join(cell.source for cell in cells if cell.cell_type == "code"))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and any(map(is_sentence, node.values)):
            node.values = [part for part in node.values if not isinstance(part, ast.Constant)]
        elif isinstance(node, ast.Constant) and is_sentence(node):
            node.value = ""
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def is_sentence(node: ast.expr) -> bool:
    """Whether a node is text that a lesson shows, which takes no time."""
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and " " in text and "==" not in text


def measured(name: str, stores: bool = False) -> dict[str, Any]:
    """Runs a lesson. Returns the seconds of all its cells, and of the longest. stores: whether to store its outputs"""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder, spinning():
        book = execute(name, Path(folder), patch, first=FIRST if stores else "", last=LAST if stores else "")
        if stores:
            store(NOTEBOOKS / name, book, code_of(name), {folder: "."})
    took = [seconds(cell) for cell in book.cells if cell.cell_type == "code"]
    return {"code": code_of(name), "seconds": round(sum(took), 1), "longest": round(max(took), 1),
            "day": time.strftime("%Y-%m-%d", time.gmtime()), "spinning": SPINNING}  # fmt: skip


def seconds(cell: Any) -> float:
    """Returns a cell's duration from nbclient's notes."""
    said = cell.metadata.get("execution", {})
    began, ended = said["iopub.execute_input"], said["shell.execute_reply"]
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """Runs 2 processes that want a core each."""
    others = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(SPINNING)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def spin() -> None:
    while True:
        pass


def head(found: dict[str, Any]) -> str:
    """Returns the line at the head of a lesson."""
    took = f"{found['seconds']:.0f} s, the longest {found['longest']:.0f} s"
    return f"*Its cells run {took}: measured on two cores that {found['spinning']} other processes kept busy.*\n\n"


def write(known: dict[str, Any]) -> None:
    """Writes the measurements into the heads of lessons."""
    for name in lessons([]):
        path = NOTEBOOKS / name
        raw = json.loads(path.read_text("utf8"))
        first = raw["cells"][0]
        text = HEAD.sub("", "".join(first["source"]), count=1)
        if name in known:
            title, _, rest = text.partition("\n\n")
            text = f"{title}\n\n{head(known[name])}{rest}"
        first["source"] = text.splitlines(keepends=True)
        path.write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", "utf8")


def main(asked: list[str]) -> None:
    known = json.loads(DATA.read_text()) if DATA.exists() else {}
    only = [a for a in asked if not a.startswith("--")]
    for name in [] if "--write" in asked else lessons(only):
        if not only and known.get(name, {}).get("code") == code_of(name):
            continue
        print(name, end=": ", flush=True)
        known[name] = measured(name, "--outputs" in asked)
        print(f"{known[name]['seconds']} s, the longest cell {known[name]['longest']} s", flush=True)
        DATA.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    write(known)


if __name__ == "__main__":
    main(sys.argv[1:])
