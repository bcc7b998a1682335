"""Checks that an executed notebook keeps a dashboard's picture, which the kernel draws without a front end."""

from __future__ import annotations

import base64
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

pytestmark = pytest.mark.notebook

CELLS = (
    "from tests.unit.synthetic import run as recorded\nwhole = recorded(steps=150)\nwhole.live = True\nwhole",
    "whole.live = False",
    "whole",
)


def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *cells: str) -> nbformat.NotebookNode:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(Path(__file__).parents[2])}}
    ).execute()
    return book


def test_a_run_that_ends_in_a_later_cell_leaves_its_picture_in_the_cell_that_showed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = executed(tmp_path, monkeypatch, *CELLS)
    shown, ended, again = (cell.outputs for cell in book.cells)
    assert not ended
    for outputs in (shown, again):
        widget, picture = outputs
        assert "application/vnd.jupyter.widget-view+json" in widget.data
        png = base64.b64decode(picture.data["image/png"])
        assert png.startswith(b"\x89PNG") and 20_000 < len(png) < 300_000
        assert "LocalSGD, from step 100" in picture.data["text/plain"]
    page, _ = HTMLExporter().from_notebook_node(book)
    assert page.count('src="data:image/png;base64,') == 2
