"""Shows a lesson on one strategy in a notebook: both timelines are drawn and all texts are legible."""

from __future__ import annotations

import nbformat
import pytest

from tests.browser.conftest import Sheet
from tests.browser.legible import hard_to_read

TIMELINE = ".twb-taught [data-view=timeline]"
pytestmark = pytest.mark.browser


def test_a_lesson_on_one_strategy_is_drawn_and_legible(sheet: Sheet) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cell = nbformat.v4.new_code_cell("from widgets.lesson import lesson\nlesson('LocalSGD')")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), sheet.jupyter.folder / "one.ipynb")
    sheet.page.set_viewport_size({"width": 1024, "height": 768})
    sheet.open("one.ipynb")
    sheet.run("lesson(")
    sheet.page.wait_for_function(f"document.querySelectorAll('{TIMELINE}').length == 2")
    for number in (0, 1):  # a chart is drawn once it is visible
        sheet.page.locator(TIMELINE).nth(number).scroll_into_view_if_needed()
        sheet.page.wait_for_function(f"document.querySelectorAll('{TIMELINE}')[{number}].dataset.draws")
    taught = sheet.page.locator(".twb-taught")
    wide = taught.evaluate("(e) => [e.scrollWidth, e.clientWidth]")
    assert wide[0] <= wide[1] + 1, f"{wide[0]} px in {wide[1]}"
    assert "strategy = LocalSGD(every=8, momentum=keep)" in taught.inner_text()
    assert hard_to_read(sheet.page, ".twb-taught") == []
    sheet.shot("taught")
