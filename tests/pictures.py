"""`make pictures`: photographs and films the dashboard of four training ranks in JupyterLab.

    python -m tests.pictures [tour cards dashboard film]

Numbers for docs/start/tour.md are drawn on the page before its photograph. The window is 1440 x 900. The dashboard is
photographed in the light and in the dark theme. The film shows a change of the strategy, its mark and its card; it
plays `SPEED` times as fast. docs/data/pictures.json has a hash of the files that pictures show, so a test finds stale
pictures.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import io
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from tests.browser.conftest import FLAGS, Sheet, served
from tests.chromium import find

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FOLDER = DOCS / "start"
HASH = DOCS / "data" / "pictures.json"
# What a picture shows: scripts, styles, and the order of the views.
SHOWN = ("widgets/static/*.js", "widgets/static/*.css", "widgets/page/*.py", "widgets/charts/theme.py")
SECONDS, RATE, SPEED = 15, 5, 3  # a film's length, pictures per second, and how much faster it plays
FILM_SIZE, COLOURS = (960, 600), 128
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


def hash_shown() -> str:
    """Returns a hash of the files that the pictures show."""
    files = sorted(path for pattern in SHOWN for path in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def set_theme(page: Any, name: str) -> None:
    """Chooses a theme in JupyterLab's menu."""
    page.locator(".lm-MenuBar-itemLabel", has_text="Settings").click()
    for item in ("Theme", name):
        page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{item}$")).first.click()
    page.wait_for_timeout(3000)


def film(sheet: Sheet, path: Path) -> None:
    """Films a change of the strategy from DDP, its mark in the timeline, and the card of its effect."""
    page, shots, count = sheet.page, list[Image.Image](), SECONDS * RATE
    page.locator(".jp-CodeCell").first.evaluate("(e) => e.scrollIntoView({ block: 'start' })")
    began = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, began + number * SPEED / RATE - time.monotonic()))
        if number == count // 6:
            choose_strategy(sheet, "LocalSGD")
        if number == count * 3 // 4:
            page.locator("[data-view=cards]").first.evaluate("(e) => e.scrollIntoView({ block: 'end' })")
        shot = Image.open(io.BytesIO(page.screenshot(type="png"))).convert("RGB")
        shots.append(shot.resize(FILM_SIZE, Image.Resampling.LANCZOS))
    print(f"filmed for {time.monotonic() - began:.0f} s; the pages say {SECONDS * SPEED} s")
    sample = Image.new("RGB", (FILM_SIZE[0], 3 * FILM_SIZE[1]))
    for place, number in enumerate((0, count // 2, count - 1)):
        sample.paste(shots[number], (0, place * FILM_SIZE[1]))
    palette = sample.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)  # keeps colours of small areas
    frames = [shot.quantize(palette=palette, dither=Image.Dither.NONE) for shot in shots]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 // RATE, loop=0, optimize=True)


def choose_strategy(sheet: Sheet, name: str) -> None:
    """Sets the strategy in the dashboard, and waits until every rank has it."""
    sheet.control("strategy").locator("select").select_option(label=name)
    sheet.page.locator(".twb-request[data-state=applied]", has_text=name).first.wait_for()


def prepare(sheet: Sheet, filmed: Path | None) -> None:
    """Trains, and makes one change and its reverse, so that the page has something to show. filmed: a film's file"""
    sheet.open("tour.ipynb")
    sheet.run("Lab(")
    sheet.state("running", timeout=300)
    sheet.past(25, timeout=300)
    if filmed:
        film(sheet, filmed)
    else:
        choose_strategy(sheet, "LocalSGD")
    sheet.past(sheet.step() + 70, timeout=300)
    choose_strategy(sheet, "DDP")
    sheet.past(sheet.step() + 25, timeout=300)
    sheet.button("Pause").click()
    sheet.state("paused")


def photograph(page: Any, name: str, folder: Path, file: str = "") -> None:
    """Scrolls to the picture's top, numbers the elements and writes the picture. file: its name, if it is not `name`"""
    top, numbered = PICTURES.get(name, (".jp-CodeCell", []))
    page.evaluate("document.querySelectorAll('.picture-number').forEach((e) => e.remove())")
    if name != "cards":
        page.locator("[data-view=straggler]").first.evaluate("(e) => e.scrollIntoView({ block: 'end' })")
    page.locator(top).first.evaluate("(e) => e.scrollIntoView({ block: 'start' })")
    page.wait_for_timeout(3000)
    for number, selector in enumerate(numbered, 1):
        page.evaluate(NUMBER, [selector, str(number)])
    page.screenshot(path=folder / f"{file or name}.png")


def main() -> int:
    """Writes the pictures; returns 1 without a Chromium."""
    from playwright.sync_api import sync_playwright

    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("names", nargs="*", choices=[*PICTURES, "dashboard", "film"])
    names = ask.parse_args().names or [*PICTURES, "dashboard", "film"]
    if (chromium := find()) is None:
        print("no Chromium on this machine, so the pictures stay as they are")
        return 1
    with tempfile.TemporaryDirectory() as tmp, served(Path(tmp)) as jupyter, sync_playwright() as play:
        (jupyter.folder / "tour.ipynb").write_text(notebook())
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
        sheet = Sheet(page, jupyter)
        prepare(sheet, DOCS / "dashboard.gif" if "film" in names else None)
        for name in [name for name in names if name in PICTURES]:
            photograph(page, name, FOLDER)
        if "dashboard" in names:
            photograph(page, "dashboard", DOCS)
            set_theme(page, "JupyterLab Dark")
            photograph(page, "dashboard", DOCS, "dashboard-dark")
        browser.close()
    HASH.write_text(json.dumps({"shown": hash_shown(), "date": datetime.date.today().isoformat()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
