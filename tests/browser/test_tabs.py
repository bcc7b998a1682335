"""Two tabs on one notebook: both show the lab's run, each can turn it, and one that is closed takes nothing with it."""

from __future__ import annotations

import nbformat
import pytest

from tests.browser.conftest import Sheet
from tests.browser.test_first_run import applied, typed

pytestmark = pytest.mark.browser
CELL = "from workbench import Lab\nlab = Lab(ranks=1)\nlab"


def test_two_tabs_show_and_turn_the_same_run_and_one_may_be_closed(sheet: Sheet) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)], metadata=kernel)
    nbformat.write(book, sheet.jupyter.folder / "tabs.ipynb")
    sheet.open("tabs.ipynb")
    sheet.run("lab = Lab(ranks=1)", keys="Control+Enter")
    sheet.control("strategy").wait_for()
    sheet.button("Start").click()
    sheet.past(2)
    other = Sheet(sheet.page.context.browser.new_page(viewport={"width": 1280, "height": 720}), sheet.jupyter)
    other.open("tabs.ipynb")
    other.run("lab = Lab(ranks=1)", keys="Control+Enter")  # the lab there is, with its run
    other.control("strategy").wait_for()
    typed(other, "pace", "30")
    assert applied(other, "pace = 30") == applied(sheet, "pace = 30") > 0
    typed(sheet, "bucket_mb", "0.5")
    at = applied(sheet, "bucket_mb = 0.5")
    assert applied(other, "bucket_mb = 0.5") == at
    other.past(at + 5)
    other.page.close()
    sheet.past(sheet.step() + 10)
    sheet.button("Stop").click()
    sheet.state("stopped")
