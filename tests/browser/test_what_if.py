"""Tests the simulator's panel in a browser: a recorded run, a slider moved by keys, the answer's timeline."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest

from tests.browser.conftest import Sheet
from tests.browser.legible import hard_to_read
from workbench import simulate
from workbench.experiment.recipes import first_run

pytestmark = pytest.mark.browser
CELL = "from workbench import Run\nfrom widgets import Dashboard\nDashboard(Run.open('recorded'))"


def record(sheet: Sheet, cell: str = CELL) -> None:
    """Writes a run directory and a notebook that shows it."""
    run = simulate(first_run().set("steps", 30).set("eval_every", 0))
    run.save(sheet.jupyter.folder / "recorded")
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)], metadata=kernel)
    nbformat.write(book, sheet.jupyter.folder / "ask.ipynb")


def opened(sheet: Sheet) -> Any:
    """Opens the panel after the charts above it are drawn, because growing charts move it."""
    sheet.page.wait_for_function("document.querySelector('[data-view=timeline]')?.dataset.draws")
    sheet.page.wait_for_timeout(1000)
    sheet.page.locator(".twb-fold").get_by_text("What if? The simulator beside the run").click()
    panel = sheet.page.locator(".twb-whatif")
    panel.wait_for()
    return panel


def test_the_simulator_answers_beside_a_recorded_run(sheet: Sheet) -> None:
    record(sheet)
    sheet.open("ask.ipynb")
    sheet.run("Dashboard(")
    panel = opened(sheet)
    ranks = panel.get_by_role("slider").first
    ranks.scroll_into_view_if_needed()
    ranks.focus()
    for _ in range(4):
        sheet.page.keyboard.press("ArrowRight")
    said = panel.get_by_text("With 8 ranks, 300 Mbit/s, 0.5 ms")
    said.wait_for()
    assert "simulated (the same)" in panel.inner_text(), panel.inner_text()
    view = panel.locator("[data-view=timeline]").first
    view.locator("canvas, .main-svg").first.wait_for()
    sheet.page.wait_for_timeout(1500)
    panel.scroll_into_view_if_needed()
    sheet.shot("what-if")
    assert not hard_to_read(sheet.page, ".twb-whatif")


DEAF = """
from widgets.charts.board import Board
hear, asked = Board._receive_message, []
def once_deaf(self, widget, said, buffers):
    asked.append(said.get("kind"))
    if asked.count("plotly") != 1 or said.get("kind") != "plotly":
        hear(self, widget, said, buffers)
Board._receive_message = once_deaf
"""


def test_charts_appear_even_if_the_first_request_for_plotly_is_lost(sheet: Sheet) -> None:
    """This happens when a page reconnects. A finished run sends nothing new, so no other message asks again."""
    record(sheet, DEAF + CELL)
    sheet.open("ask.ipynb")
    sheet.run("Dashboard(")
    sheet.page.wait_for_function("document.querySelector('[data-view=timeline]')?.dataset.draws")
    sheet.page.wait_for_function("document.querySelector('[data-view=timeline]').dataset.draws > 0")
    assert int(sheet.page.locator("[data-view=timeline]").get_attribute("data-spans") or 0) > 100
