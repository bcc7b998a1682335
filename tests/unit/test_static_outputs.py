"""Tests how outputs of a lesson become text, tables and pictures that need no kernel."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from tests.chromium import find
from tests.static_outputs import (
    FIRST,
    KEY,
    bare,
    convert,
    describe,
    drop_controls,
    painting,
    plain,
    shrink,
    store,
    strip,
)
from widgets.course.handout import Lesson
from widgets.lesson import draw_lines, handed_in

ROOT = Path(__file__).parents[2]
WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = {
    "box": {"model_name": "VBoxModel", "state": {"children": ["IPY_MODEL_ask", "IPY_MODEL_radio", "IPY_MODEL_go"]}},
    "ask": {"model_name": "HTMLModel", "state": {"value": "<style>b {}</style><b class='x'>How long?</b>"}},
    "radio": {"model_name": "RadioButtonsModel", "state": {"_options_labels": ["1 s", "< 2 s"]}},
    "go": {"model_name": "ButtonModel", "state": {"description": "Check"}},
    "chart": {"model_name": "AnyModel", "state": {}},
}


def never(figure: Any) -> str:
    raise AssertionError("there is no figure")


def picture(size: int = 64) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((size, size), 90).save(file, "png")
    return file.getvalue()


def test_a_prediction_becomes_its_question_and_its_answers() -> None:
    made = convert(
        new_output("display_data", {WIDGET: {"model_id": "box"}, "text/plain": "Prediction()"}), STATE, never
    )
    assert made is not None
    assert "".join(made["data"]["text/html"]).endswith("How long?</b></p><ul><li>1 s</li><li>&lt; 2 s</li></ul>")
    assert made["data"]["text/plain"] == ["How long?\n", "1 s\n", "< 2 s"]


def test_a_chart_without_a_picture_becomes_a_sentence() -> None:
    made = convert(new_output("display_data", {WIDGET: {"model_id": "chart"}, "text/plain": "Board()"}), STATE, never)
    assert made is not None and "JupyterLab shows" in made["data"]["text/plain"][0]


def test_a_run_is_shown_as_its_picture_without_its_dashboard_and_its_progress_bar() -> None:
    widgets = [new_output("display_data", {WIDGET: {"model_id": name}}) for name in ("bar", "box")]
    run = new_output("display_data", {"image/png": "", "text/plain": "Run DDP"})
    state = {**STATE, "bar": {"model_name": "HBoxModel", "state": {"children": ["IPY_MODEL_p"]}},
             "p": {"model_name": "FloatProgressModel", "state": {}}}  # fmt: skip
    assert drop_controls(widgets, state) == widgets[1:]
    assert drop_controls([*widgets, run], state) == [run]


def test_a_stored_worksheet_is_for_hand_outs_and_is_no_students_work(tmp_path: Path) -> None:
    sheet = {"version": 1, "lesson": "01 First run", "items": [{"kind": "exercise", "question": "Why?", "tries": 1}]}
    said = new_output("execute_result", {"text/plain": "Worksheet"}, metadata={KEY: sheet})
    made = convert(said, {}, never)
    assert made is not None and made["metadata"][KEY] == {**sheet, "stored": True}
    book = book_of(tmp_path / "one.ipynb", new_code_cell("worksheet()", outputs=[said]))
    nbformat.write(book, tmp_path / "ada.ipynb")
    store(tmp_path / "one.ipynb", book, "abc", {})
    assert handed_in(tmp_path)["student"].tolist() == ["ada"]
    assert Lesson(tmp_path / "one.ipynb")._list_stored_items() == sheet["items"]
    assert '"jupyter"' not in Lesson(tmp_path / "one.ipynb").make_notebook([])


def test_the_first_cell_shows_results_without_a_guess_and_titles_without_a_date() -> None:
    code = (
        FIRST
        + """
from tests.unit.synthetic import run
guess, shown = Prediction("How long?", ["1", "2"]), run(steps=5)
shown.name = "20261130-000126-DDP"
print(guess.after(3), guess.against("2"), picture.describe_picture(shown)[:9])"""
    )
    code = "from widgets.charts import picture\nfrom widgets.lesson import Prediction\n" + code
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "3 The record says: 2. Run DDP: \n"


def test_a_table_loses_its_looks_and_keeps_its_cells() -> None:
    html = '<style scoped>td {}</style><table border="1" class="dataframe"><tr><td style="x">1</td></tr></table>'
    assert bare(html) == "<table><tr><td>1</td></tr></table>"
    assert plain("<p>a</p><ul><li>b &lt; c</li></ul>") == "a\nb < c"


def test_streams_keep_what_was_printed_and_drop_warnings() -> None:
    assert convert(new_output("stream", name="stderr", text="WARNING"), {}, never) is None
    made = convert(new_output("stream", name="stdout", text="\x1b[31mred\x1b[0m\n"), {}, never)
    assert made == {"output_type": "stream", "name": "stdout", "text": ["red\n"]}


def test_a_failed_cell_stores_nothing() -> None:
    with pytest.raises(ValueError, match="a cell failed: KnobError: every=0"):
        convert(new_output("error", ename="KnobError", evalue="every=0", traceback=[]), {}, never)


def test_a_figure_becomes_a_picture_with_its_description() -> None:
    figure = json.loads(draw_lines({"a": ([1, 2], [3, 4])}, "x (s)", "y (ms)", "Drift").to_json())
    output = new_output("display_data", {"application/vnd.plotly.v1+json": figure})
    made = convert(output, {}, lambda shown: "painted")
    assert made is not None and made["data"]["image/png"] == "painted"
    assert made["data"]["text/plain"] == ["Drift. y (ms) over x (s). a: from 3 at 1 to 4 at 2."]
    assert describe({"layout": {"title": {"text": "<b>Cost</b>"}}}) == "Chart: Cost"


@pytest.mark.browser
def test_a_painted_figure_is_as_wide_as_a_page_and_as_high_as_its_layout() -> None:
    if find() is None:
        pytest.skip("no chromium on this machine")
    figure = json.loads(draw_lines({"a": ([1, 2], [3, 4])}, "x (s)", "y (ms)", "Drift").to_json())
    with painting() as paint:
        painted = Image.open(io.BytesIO(base64.b64decode(paint(figure))))
    assert painted.size == (1000, figure["layout"]["height"])


def test_a_picture_has_few_colours_and_at_most_300_kb() -> None:
    assert Image.open(io.BytesIO(base64.b64decode(shrink(picture())))).mode == "P"
    with pytest.raises(ValueError, match="may have 300000"):
        shrink(picture(1000))


def book_of(path: Path, *cells: Any) -> Any:
    book = new_notebook(cells=list(cells))
    bare_cells = [new_code_cell(cell.source, id=cell.id) for cell in cells]
    nbformat.write(new_notebook(cells=bare_cells), path)
    return book


def test_stored_outputs_are_hidden_until_the_cell_runs_and_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "one.ipynb"
    said = new_output("execute_result", {"text/plain": f"{tmp_path}/runs"}, execution_count=3)
    book = book_of(path, new_code_cell("1 + 1", outputs=[said], execution_count=3), new_code_cell("x = 2"))
    before = json.loads(path.read_text())
    assert store(path, book, "abc", {str(tmp_path): "."}) == 1
    raw = json.loads(path.read_text())
    assert raw["metadata"][KEY] == {"code": "abc", "cells": 1}
    first, second = raw["cells"]
    assert first["metadata"] == {"jupyter": {"outputs_hidden": True}} and second["metadata"] == {}
    assert first["outputs"][0]["data"] == {}, "JupyterLab shows the first line of the first output"
    assert first["outputs"][1:] == [{"output_type": "display_data", "data": {"text/plain": ["./runs"]}, "metadata": {}}]
    assert first["execution_count"] is None
    nbformat.validate(nbformat.read(path, as_version=4))
    assert strip(raw) == before


def test_outputs_with_a_name_of_this_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.ipynb"
    said = new_output("execute_result", {"text/plain": f"in {Path.home()}/runs"})
    book = book_of(path, new_code_cell("1 + 1", outputs=[said]))
    with pytest.raises(ValueError, match="which is of this machine"):
        store(path, book, "abc", {})
    with pytest.raises(ValueError, match="other cells"):
        store(path, new_notebook(cells=[new_code_cell("2 + 2")]), "abc", {})
