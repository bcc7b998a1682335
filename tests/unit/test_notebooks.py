"""The lessons as files: stripped, small, and in the order a lesson has."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(p.name for p in FOLDER.glob("*.ipynb"))


def book(name: str) -> Any:
    return nbformat.read(FOLDER / name, as_version=4)


def code(name: str) -> list[str]:
    return [cell.source for cell in book(name).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_is_stripped_and_small(name: str) -> None:
    raw = json.loads((FOLDER / name).read_text())
    cells = [c for c in raw["cells"] if c["cell_type"] == "code"]
    assert not any(c["outputs"] or c["execution_count"] for c in cells)
    assert "widgets" not in raw["metadata"] and raw["metadata"]["kernelspec"]["name"] == "python3"
    assert (FOLDER / name).stat().st_size < 20_000
    nbformat.validate(book(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_lesson_is_short_and_parses(name: str) -> None:
    for source in code(name):
        ast.parse(source)
        assert len(source.splitlines()) <= 12, source


def test_three_lines_lead_from_nothing_to_the_dashboard() -> None:
    assert code("00_first_run.ipynb")[0].splitlines() == ["from workbench import Lab", "lab = Lab(ranks=4)", "lab"]


def test_a_lesson_asks_before_it_shows() -> None:
    sources = code("01_reading_a_timeline.ipynb")
    order = [
        next(i for i, s in enumerate(sources) if word in s)
        for word in ("Prediction(", "lab.run", "guess.against", "lab.turn", "riddle.check")
    ]
    assert order == sorted(order)
