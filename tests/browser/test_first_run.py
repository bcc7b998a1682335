"""Tests the main job in a browser: start, change controls by mouse and keys, stop, reload.

Real ranks train. The test compares the facts of the drawn page with the run directory that the ranks wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.conftest import PATIENT, Sheet
from tests.browser.legible import hard_to_read, texts
from widgets.charts.marks import change_marks
from workbench.run import Run

pytestmark = pytest.mark.browser
DRAWN = ("compute", "comm", "wait", "codec", "port", "eval", "switch")  # lanes that the timeline shows


def drawn(sheet: Sheet, view: str, name: str) -> Any:
    """Returns a fact that the page keeps about its drawing."""
    return json.loads(sheet.page.locator(f"[data-view={view}]").first.get_attribute(f"data-{name}") or "null")


def applied(sheet: Sheet, text: str) -> int:
    """Waits until the page lists a change as applied; returns the step."""
    item = sheet.page.locator(".twb-request[data-state=applied]", has_text=text).first
    item.wait_for()
    return int(item.locator(".twb-said").inner_text().rpartition(" ")[2])


def by_mouse(sheet: Sheet, path: str, share: float) -> str:
    """Drags a slider's thumb to a share of its length; returns the value in the box next to it."""
    slider = sheet.control(path).locator(".twb-slider")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    mouse, middle = sheet.page.mouse, box["y"] + box["height"] / 2
    now = int(slider.input_value()) / int(slider.get_attribute("max"))
    mouse.move(box["x"] + 8 + now * (box["width"] - 16), middle)
    mouse.down()
    mouse.move(box["x"] + 8 + share * (box["width"] - 16), middle, steps=5)
    mouse.up()
    return str(sheet.control(path).locator(".twb-entry").input_value())


def by_keys(sheet: Sheet, path: str, *keys: str) -> str:
    """Presses keys on a slider; returns the value in the box next to it."""
    slider = sheet.control(path).locator(".twb-slider")
    slider.focus()
    for key in keys:
        sheet.page.keyboard.press(key)
    return str(sheet.control(path).locator(".twb-entry").input_value())


def typed(sheet: Sheet, path: str, text: str) -> None:
    """Types into the box of a control and presses Enter."""
    sheet.control(path).locator(".twb-entry").focus()
    sheet.page.keyboard.press("Control+a")
    sheet.page.keyboard.type(text)
    sheet.page.keyboard.press("Enter")


def lettered(sheet: Sheet, path: str, text: str) -> None:
    """Chooses by typing the first letters; retries if a busy page took them for separate words."""
    select = sheet.control(path).locator("select")
    select.focus()
    for _ in range(5):
        sheet.page.keyboard.type(text)
        if select.locator("option:checked").inner_text().startswith(text):
            return
        sheet.page.wait_for_timeout(1500)
    raise AssertionError(f"{text} could not be chosen by its letters")


def recorded(sheet: Sheet) -> Run:
    """Opens the only run directory."""
    (path,) = (sheet.jupyter.data / "training-workbench" / "runs").iterdir()
    return Run.open(path)


def compare_with_record(sheet: Sheet, run: Run, *, fresh: bool) -> None:
    """Compares marks, loss points and spans on the page with the record.

    The page counts the spans that it drew. On a fresh page these are the spans of the shown steps and between them.
    """
    samples = run.samples
    losses = [int(((samples.name == "loss") & (samples["rank"] == r)).sum()) for r in range(4)]
    held = int((samples.name == "held_out").sum())
    sheet.page.locator("[data-view=loss]").scroll_into_view_if_needed()
    for _ in range(10 * PATIENT):  # a curve is drawn twice a second
        if [n for n in drawn(sheet, "loss", "points") if n] == [*losses, *losses, held, held]:
            break
        sheet.page.wait_for_timeout(100)
    assert [n for n in drawn(sheet, "loss", "points") if n] == [*losses, *losses, held, held]
    assert drawn(sheet, "loss", "marks") == [m.label for m in change_marks(run)]
    rows = run.timeline.spans.rows()
    first, last = drawn(sheet, "timeline", "first-step"), drawn(sheet, "timeline", "newest-step")
    steps = rows[rows.equal("lane", "step") & (rows.step >= first) & (rows.step <= last)]
    assert last == min(int(rows[rows.equal("lane", "step") & (rows.rank == r)].step.max()) for r in range(4))
    visible = np.isin(rows.lane, DRAWN)
    inside = visible & (rows.t1 >= steps.t0.min()) & (rows.asked <= steps.t1.max())
    least = int((inside & (rows.step >= first) & (rows.step <= last)).sum())  # the evaluation before `first` has ended
    most = int(inside.sum())
    assert least <= drawn(sheet, "timeline", "spans") <= len(rows)
    if fresh:
        assert drawn(sheet, "timeline", "spans") <= most


def steer(sheet: Sheet) -> None:
    """Changes strategy, bucket and ratio by mouse and by keyboard while the ranks train."""
    typed(sheet, "pace", "60")
    assert applied(sheet, "pace = 60") > 0
    typed(sheet, "fabric.link.bandwidth", "300")
    assert applied(sheet, "bandwidth = 300") > 0
    bucket = by_mouse(sheet, "bucket_mb", 0.2)
    assert float(bucket) < 0.2 and applied(sheet, f"bucket_mb = {bucket}") > 0
    bucket = by_keys(sheet, "bucket_mb", "ArrowRight", "ArrowRight", "ArrowRight")
    assert float(bucket) > 0.2 and applied(sheet, f"bucket_mb = {bucket}") > 0
    sheet.control("strategy").locator("select").select_option(label="LocalSGD")
    assert applied(sheet, "LocalSGD") > 0
    sheet.shot("first-run-local-sgd")
    every = by_keys(sheet, "strategy.every", "ArrowLeft")
    assert every == "4" and applied(sheet, "every = 4") > 0
    lettered(sheet, "strategy", "DDP")
    assert applied(sheet, "DDP") > 0
    lettered(sheet, "compressor", "TopK +")
    assert applied(sheet, "TopK") > 0
    density = by_mouse(sheet, "compressor.of.density", 0.75)
    assert float(density) > 0.01 and applied(sheet, f"density = {density}") > 0
    density = by_keys(sheet, "compressor.of.density", "Home")
    assert density == "0.0001" and applied(sheet, "density = 0.0001") > 0


def refused(sheet: Sheet) -> None:
    """Checks that an invalid entry shows an error next to its control, and nothing changes."""
    typed(sheet, "bucket_mb", "0")
    error = sheet.control("bucket_mb").locator(".twb-error")
    error.wait_for()
    assert "bucket_mb=0: must be a number in [0.01, 1024] MB" in error.inner_text()
    assert sheet.page.locator(".twb-request", has_text="bucket_mb = 0 ").count() == 0
    sheet.shot("first-run-refused")


def legible_in_both_themes(sheet: Sheet) -> None:
    """Checks that controls and charts have legible texts of at least 14 px in both themes."""
    assert len(texts(sheet.page)) > 40
    assert hard_to_read(sheet.page) == []
    sheet.theme("JupyterLab Dark")
    assert hard_to_read(sheet.page) == []
    sheet.shot("first-run-dark")
    sheet.theme("JupyterLab Light")


def again(sheet: Sheet) -> None:
    """Reloads the page and runs the dashboard's cell."""
    sheet.page.reload()
    sheet.ready()
    sheet.run("lab = Lab(ranks=4)", keys="Control+Enter")  # Shift+Enter would scroll to the next cell
    sheet.page.wait_for_function("document.querySelector('[data-view=timeline]')?.dataset.draws")


def test_a_person_starts_changes_stops_and_reloads_a_run(sheet: Sheet) -> None:
    sheet.open("01_first_run.ipynb")
    sheet.run("lab = Lab(ranks=4)")
    sheet.control("strategy").wait_for()
    sheet.button("Start").click()
    sheet.state("running")
    sheet.past(3)
    refused(sheet)
    steer(sheet)
    sheet.past(sheet.step() + 12)
    sheet.shot("first-run-steered")
    sheet.button("Stop").click()
    sheet.state("stopped")
    sheet.page.wait_for_timeout(1500)
    run = recorded(sheet)
    assert run.state == "stopped" and len(run.changes) >= 10
    compare_with_record(sheet, run, fresh=False)
    listed = [int(t.rpartition(" ")[2]) for t in sheet.page.locator(".twb-request .twb-said").all_inner_texts()]
    assert listed == [c.at_step for c in reversed(run.changes)]
    sheet.shot("first-run-stopped")
    legible_in_both_themes(sheet)

    sheet.save()
    saved = sheet.jupyter.folder / "01_first_run.ipynb"
    assert "jupyter.widget-view" in saved.read_text() and saved.stat().st_size < 1_000_000
    again(sheet)
    sheet.page.wait_for_timeout(2000)
    compare_with_record(sheet, run, fresh=True)
    assert [Path(str(run.path))] == list((sheet.jupyter.data / "training-workbench" / "runs").iterdir())
    sheet.shot("first-run-reloaded")
