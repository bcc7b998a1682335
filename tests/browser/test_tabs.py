"""Opens two tabs on one notebook: both show and change the lab's run, and closing one keeps the other."""

from __future__ import annotations

import nbformat
import pytest

from tests.browser.conftest import Sheet
from tests.browser.test_first_run import applied, typed

pytestmark = pytest.mark.browser
CELL = "from workbench import Lab\nlab = Lab(ranks=1)\nlab"


def opened(sheet: Sheet, cell: str) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)], metadata=kernel)
    nbformat.write(book, sheet.jupyter.folder / "tabs.ipynb")
    sheet.open("tabs.ipynb")


def test_a_page_that_asks_for_a_kernel_gets_one(sheet: Sheet) -> None:
    """JupyterLab sometimes asks for a kernel in a second tab."""
    opened(sheet, "there = 1")
    sheet.run("there")
    sheet.page.get_by_role("menuitem", name="Kernel", exact=True).click()
    sheet.page.locator(".lm-Menu-itemLabel", has_text="Change Kernel").click()
    sheet.page.wait_for_function("document.querySelector('dialog.jp-Dialog select')")
    sheet.run("there")
    assert not sheet.page.locator("dialog.jp-Dialog").count()


def test_two_tabs_show_and_change_the_same_run_and_one_may_be_closed(sheet: Sheet) -> None:
    opened(sheet, CELL)
    sheet.run("lab = Lab(ranks=1)", keys="Control+Enter")
    sheet.control("strategy").wait_for()
    sheet.button("Start").click()
    sheet.past(2)
    other = Sheet(sheet.page.context.browser.new_page(viewport={"width": 1280, "height": 720}), sheet.jupyter)
    other.open("tabs.ipynb")
    other.run("lab = Lab(ranks=1)", keys="Control+Enter")  # the existing lab with its run
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
