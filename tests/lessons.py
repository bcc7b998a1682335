"""Runs a lesson from its first cell to its last with real ranks, without a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.static_outputs import strip
from widgets.course.questions import read_questions
from widgets.teach.worksheet import KEY

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def execute(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str = "", last: str = "", **after: str
) -> nbformat.NotebookNode:
    """Returns the notebook with its outputs. The files of its runs and engines are under `tmp_path`.

    first: code to run before the first cell
    last:  code to run after the last cell. The cells of `first` and `last` are not returned
    after: a text in a cell -> code to run after that cell
    """
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "labs"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.from_dict(strip(nbformat.read(NOTEBOOKS / name, as_version=4)))
    for text, code in after.items():
        at = next(i for i, c in enumerate(book.cells) if c.cell_type == "code" and text in c.source)
        book.cells.insert(at + 1, nbformat.v4.new_code_cell(code))
    if first:
        book.cells.insert(0, nbformat.v4.new_code_cell(first))
    if last:
        book.cells.append(nbformat.v4.new_code_cell(last))
    client = NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    if first:
        book.cells.pop(0)
    if last:
        book.cells.pop()
    nbformat.write(book, tmp_path / name)
    assert unread_questions(book) == [], "a hand-out's answers.json lacks these questions"
    return book


def unread_questions(book: nbformat.NotebookNode) -> list[str]:
    """Returns the questions of the worksheets in a notebook's outputs that the cells' text does not show."""
    asked = read_questions([cell.source if cell.cell_type == "code" else None for cell in book.cells])
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    sheets = [output.metadata[KEY] for output in outputs if KEY in output.get("metadata", {})]
    return [item["question"] for sheet in sheets for item in sheet["items"]
            if not any(one.asks(item["kind"], item["question"]) for one in asked)]  # fmt: skip


def results(book: nbformat.NotebookNode) -> list[Any]:
    """Returns the plain-text results of the code cells in order; None for a cell without result."""
    shown = []
    for cell in book.cells:
        if cell.cell_type == "code":
            texts = [o.data["text/plain"] for o in cell.outputs if o.output_type == "execute_result"]
            shown.append(texts[-1] if texts else None)
    return shown


def texts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **after: str) -> list[str]:
    """Returns the plain-text results of the code cells after `execute`."""
    return [text for text in results(execute(name, tmp_path, monkeypatch, **after)) if text]
