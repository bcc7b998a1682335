"""`make pictures`: photographs the dashboard of four training ranks in JupyterLab, with numbers for docs/start/tour.md.

Numbers are drawn on the page before the photograph. The theme is light, the window 1440 x 900.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.browser.conftest import FLAGS, Sheet, served
from tests.chromium import find

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "start"
CELL = """from workbench import Lab, recipe
lab = Lab(ranks=4)
run = lab.run(recipe("first_run"))
lab"""
# For each picture: the element at its top, and the numbered elements in the order of docs/start/tour.md.
PICTURES = {
    "tour": (".jp-CodeCell", [
        ".twb-transport", ".twb-state", ".twb-row[data-path=strategy]",
        ".twb-row[data-path='fabric.link.bandwidth']", "[data-view=straggler]", "[data-view=timeline] .wb-head",
        "[data-view=timeline] .wb-chart",
    ]),
    "cards": ("[data-view=cards]", []),
}  # fmt: skip
NUMBER = """([selector, number]) => {
  const found = [...document.querySelectorAll(selector)].find((e) => e.getBoundingClientRect().width);
  if (!found) throw new Error(`no ${selector}`);
  const box = found.getBoundingClientRect(), mark = document.createElement("div");
  mark.textContent = number;
  mark.className = "picture-number";
  mark.style.cssText = `position: fixed; z-index: 9999; left: ${box.left - 23}px;
    top: ${box.top + Math.min(box.height / 2, 24) - 11}px; width: 22px; height: 22px; border-radius: 11px;
    background: #b3261e; color: white; font: bold 15px/22px sans-serif; text-align: center;`;
  document.body.append(mark);
}"""


def notebook() -> str:
    """Returns a notebook with one cell."""
    cell = {"cell_type": "code", "execution_count": None, "id": "lab", "metadata": {}, "outputs": [], "source": CELL}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return json.dumps({"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})


def prepare(sheet: Sheet) -> None:
    """Trains, and makes one change and its reverse, so that the page has something to show."""
    sheet.open("tour.ipynb")
    sheet.run("Lab(")
    sheet.state("running", timeout=300)
    sheet.past(25, timeout=300)
    strategy = sheet.control("strategy").locator("select")
    strategy.select_option(label="LocalSGD")
    sheet.page.locator(".twb-request[data-state=applied]", has_text="LocalSGD").first.wait_for()
    sheet.past(sheet.step() + 70, timeout=300)
    strategy.select_option(label="DDP")
    sheet.past(sheet.step() + 25, timeout=300)
    sheet.button("Pause").click()
    sheet.state("paused")


def photograph(page: Any, name: str, folder: Path) -> None:
    """Scrolls to the picture's top, numbers the elements and writes the picture."""
    top, numbered = PICTURES[name]
    page.evaluate("document.querySelectorAll('.picture-number').forEach((e) => e.remove())")
    page.locator(top).first.evaluate("(e) => e.scrollIntoView({ block: 'start' })")
    page.wait_for_timeout(3000)
    for number, selector in enumerate(numbered, 1):
        page.evaluate(NUMBER, [selector, str(number)])
    page.screenshot(path=folder / f"{name}.png")


def main() -> int:
    """Writes the pictures; returns 1 without a Chromium."""
    from playwright.sync_api import sync_playwright

    if (chromium := find()) is None:
        print("no Chromium on this machine, so the pictures stay as they are")
        return 1
    with tempfile.TemporaryDirectory() as tmp, served(Path(tmp)) as jupyter, sync_playwright() as play:
        (jupyter.folder / "tour.ipynb").write_text(notebook())
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
        prepare(Sheet(page, jupyter))
        for name in PICTURES:
            photograph(page, name, FOLDER)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
