"""Checks that a dashboard still receives its kernel's messages after its cell reruns or the page loads late."""

from __future__ import annotations

from collections.abc import Iterator

import nbformat
import pytest

from tests.browser.conftest import Sheet, opened, served

pytestmark = pytest.mark.browser
LATE = 3.0  # seconds by which the page's code is late; anywidget waits for 2
CELLS = (
    "from tests.browser.still import still\nfrom widgets import Dashboard\nlab = still()",
    f"""from widgets.charts.board import Board
from widgets.controls.controls import Controls
from widgets.controls.requests import Requests
from widgets.controls.transport import Transport
for kind in (Board, Controls, Requests, Transport):
    kind._esm = "await new Promise((done) => setTimeout(done, {1000 * LATE:.0f}));\\n" + kind._esm""",
    "shown = Dashboard(lab)",
    "shown  # once more",
    "shown.board.report_trouble('this was heard')",
    "lab.end()",
)


@pytest.fixture
def empty(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Sheet]:
    """A notebook whose cells show a training lab. None of them has run."""
    with served(tmp_path_factory.mktemp("hearing")) as jupyter, opened(jupyter, request) as sheet:
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS], metadata=kernel)
        nbformat.write(book, jupyter.folder / "hearing.ipynb")
        sheet.open("hearing.ipynb")
        sheet.run("lab = still()", keys="Control+Enter")
        yield sheet


def show(sheet: Sheet) -> None:
    """Shows the dashboard and waits until its timeline is drawn."""
    sheet.run("once more", keys="Control+Enter")
    drawn = "document.querySelector('.jp-OutputArea-output [data-view=timeline]')?.dataset.draws > 0"
    sheet.page.wait_for_function(drawn)


def test_a_board_receives_messages_after_its_cell_is_run_again(empty: Sheet) -> None:
    empty.run("shown = Dashboard(lab)", keys="Control+Enter")
    for _ in range(2):
        show(empty)
    empty.run("report_trouble", keys="Control+Enter")
    empty.page.locator(".wb-trouble", has_text="this was heard").wait_for()
    empty.page.wait_for_timeout(17_000)  # as long as the page waits for an answer
    assert empty.page.locator(".wb-apart").count() == 0


def test_a_board_receives_messages_if_the_pages_code_loads_late(empty: Sheet) -> None:
    empty.run("kind._esm", "shown = Dashboard(lab)", keys="Control+Enter")
    show(empty)
    row = empty.control("bucket_mb").locator(".twb-entry")
    row.fill("0")
    row.press("Enter")
    empty.control("bucket_mb").locator(".twb-error").wait_for()
    row.fill("2")
    row.press("Enter")
    empty.page.locator(".twb-request", has_text="bucket_mb = 2").wait_for()
    empty.run("lab.end()", keys="Control+Enter")
    empty.page.locator(".twb-state[data-state=idle]").wait_for()
    assert empty.page.locator(".wb-apart").count() == 0
