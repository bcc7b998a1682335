"""Tests details of the board in Chromium: names that do not overlap, needed axes only, boxes by keyboard."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_board import Bridge
from tests.browser.test_board import browser as browser
from tests.unit.encoded import SLOW, TOPK, Author
from tests.unit.synthetic import run as recorded
from workbench.record.timeline import Span
from workbench.run import Run

pytestmark = pytest.mark.browser


def crowded() -> Run:
    """Returns a run of two ranks whose three transfers of a step overlap in time."""
    run = Run({"ranks": 2}, name="crowded")
    for step in range(8):
        t = 0.1 + 0.1 * step
        for rank in range(2):
            rows = [Span(rank, step, "compute", "forward", t, t, t + 0.02, 0)]
            for k, (begin, end) in enumerate(((0.01, 0.06), (0.03, 0.07), (0.034, 0.099))):
                rows.append(Span(rank, step, "comm", f"all_reduce bucket {k}", t + begin, t + begin, t + end, 1000))
            rows.append(Span(rank, step, "step", "step", t, t, t + 0.1, 0))
            run.timeline.spans.add(rows)
    return run


def test_names_of_overlapping_transfers_do_not_overlap(browser: Any, tmp_path: Path) -> None:
    bridge = Bridge(browser, tmp_path, crowded())
    bridge.drawn("timeline")
    written = bridge.page.evaluate("document.querySelector('[data-view=timeline] canvas').written")
    assert {word for word, *_ in written} >= {"bucket 2"} and len(written) >= 6
    rows: dict[int, list[tuple[float, float]]] = {}
    for _, left, right, y in written:
        rows.setdefault(round(y), []).append((left, right))
    for row in rows.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(row)))


def test_only_measured_quantities_have_axes(browser: Any, tmp_path: Path) -> None:
    author = Author(TOPK)
    author.steps(30, SLOW)
    bridge = Bridge(browser, tmp_path, author.run)
    bridge.drawn("timeline", "compression")
    titles = "[...document.querySelectorAll('[data-view={}] :is(.g-xtitle, .g-x2title, .g-x3title)')].length"
    assert bridge.fact("compression", "points")[0] == 30
    assert bridge.page.evaluate(titles.format("compression")) == 1
    empty = bridge.page.locator("[data-view=drift]")
    assert "appears here" in empty.inner_text() and not empty.locator(".wb-chart").is_visible()


def test_boxes_are_reached_and_described_by_keyboard(browser: Any, tmp_path: Path) -> None:
    run = recorded(steps=60, ranks=2)
    bridge = Bridge(browser, tmp_path, run)
    bridge.drawn("timeline")
    bridge.page.locator("[data-view=timeline] .wb-frame").focus()
    tip = bridge.page.locator("[data-view=timeline] .wb-tip")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowLeft"):
        bridge.page.keyboard.press(key)
        bridge.settle(300)
        said.append(tip.inner_text().splitlines()[:2])
    first = bridge.fact("timeline", "first-step")
    assert said[0][0] in ("forward", "backward", "update") and said[1] != said[0]
    assert "all_reduce" in said[2][0] and f"rank 0, step {first}" in said[2][1]
    assert "rank 1" in said[3][1] and "all_reduce" in said[4][0] and "rank 0" in said[4][1]
    bridge.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_enter_pins_a_box_and_describes_it_and_escape_releases_it(browser: Any, tmp_path: Path) -> None:
    bridge = Bridge(browser, tmp_path, recorded(steps=60, ranks=2))
    bridge.drawn("timeline")
    frame, page = bridge.page.locator("[data-view=timeline] .wb-frame"), bridge.page
    tip, said = (page.locator(f"[data-view=timeline] {name}") for name in (".wb-tip", ".wb-said"))
    page.locator("[data-view=timeline] [type=number]").focus()
    while not frame.evaluate("(e) => e === document.activeElement"):
        page.keyboard.press("Tab")
    assert frame.evaluate("(e) => getComputedStyle(e).outlineStyle") == "solid"

    def press(key: str) -> str:
        page.keyboard.press(key)
        bridge.settle(300)
        return str(said.inner_text())

    first = bridge.fact("timeline", "first-step")
    assert press("Home").startswith(f"Rank 0, step {first}: forward, ")
    last = press("End")
    assert "update" in last and press("Enter") == f"{last[:-1]}, pinned."
    held = bridge.fact("timeline", "first-step")
    page.locator("[data-view=timeline] [type=number]").focus()
    bridge.settle(300)
    assert tip.is_visible() and "pinned" in tip.inner_text()  # the tip stays when the focus moves elsewhere
    frame.focus()
    press("PageUp")
    assert bridge.fact("timeline", "first-step") == held - 1
    press("PageDown")
    assert press("Escape") == "" and not tip.is_visible()
    assert press("ArrowDown").startswith("Rank ")
    assert press("Escape") == "" and frame.evaluate("(e) => e === document.activeElement")
    press("Escape")
    assert page.evaluate("document.activeElement.closest('.wb-tools') !== null")


def test_a_ranks_name_in_the_legend_highlights_it(browser: Any, tmp_path: Path) -> None:
    bridge = Bridge(browser, tmp_path, recorded(steps=60, ranks=3))
    bridge.drawn("loss")
    shown = """() => document.querySelector('[data-view=loss] .wb-chart').data
      .filter((t) => t.meta?.rank !== undefined && t.xaxis === 'x').map((t) => [t.line.dash, t.opacity])"""
    plain = bridge.page.evaluate(shown)
    assert len({dash for dash, _ in plain}) == 3 and {opacity for _, opacity in plain} == {0.75}
    button = bridge.page.locator("[data-view=loss] .wb-rank[data-rank='1']")
    alone = [0.15, 1, 0.15]
    button.focus()
    bridge.until(lambda: [opacity for _, opacity in bridge.page.evaluate(shown)] == alone)
    bridge.page.keyboard.press("Enter")
    button.blur()
    bridge.settle(1500)
    assert button.get_attribute("aria-pressed") == "true"
    bridge.until(lambda: [opacity for _, opacity in bridge.page.evaluate(shown)] == alone)
    button.click()
    bridge.page.mouse.move(0, 0)
    button.blur()
    bridge.until(lambda: [opacity for _, opacity in bridge.page.evaluate(shown)] == [0.75] * 3)
