"""Runs a lesson from its first cell to its last with real ranks, without a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def execute(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **after: str) -> nbformat.NotebookNode:
    """Returns the notebook with its outputs. The files of its runs and engines are under `tmp_path`.

    after: a text in a cell -> code to run after that cell
    """
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "labs"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(NOTEBOOKS / name, as_version=4)
    for text, code in after.items():
        at = next(i for i, c in enumerate(book.cells) if c.cell_type == "code" and text in c.source)
        book.cells.insert(at + 1, nbformat.v4.new_code_cell(code))
    client = NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    nbformat.write(book, tmp_path / name)
    return book


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
