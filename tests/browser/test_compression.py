"""Tests the compression panels in Chromium: shown when ranks compress, legible in light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import ARTEFACTS, patient
from tests.browser.test_board import Bridge, part
from tests.browser.test_board import browser as browser
from tests.unit.encoded import DENSE, SLOW, TOPK, WHOLE, Author
from widgets.export.report import write_report
from workbench import ByteGPT, Experiment, TopK, simulate
from workbench.fabric import Fabric, Link
from workbench.run import Run

pytestmark = pytest.mark.browser


def test_the_panels_appear_with_the_first_compression_and_follow_it(browser: Any, tmp_path: Path) -> None:
    author = Author(DENSE, measure_every=5)
    author.steps(30, WHOLE)
    dense = author.now
    author.set("compressor", TOPK)
    for k in range(8):
        author.steps(5, SLOW._replace(sent=10_000 * (1 + k)), 5, (0.9 - 0.05 * k, 0.5 + 0.05 * k, 1.0 + k))
    live = Run(author.run.settings, live=True)
    part(author.run, dense - 1e-6, live)
    bridge = Bridge(browser, tmp_path, live)
    bridge.drawn("timeline", "loss")
    text, chart = (bridge.page.locator(f"[data-view={name}]") for name in ("pays", "compression"))
    assert "Compression is off" in text.inner_text() and not chart.is_visible()
    part(author.run, 99.0, live, dense - 1e-6)
    bridge.drawn("compression")
    bridge.until(lambda: bridge.fact("compression", "points") == [40, 8, 8, 8])
    bridge.until(lambda: "on this link Dense would be faster" in text.inner_text())
    assert bridge.fact("compression", "marks") == ["TopK(density=0.01)"]
    chart.get_by_role("button", name="Data table").click()
    bridge.until(lambda: chart.locator("tbody tr").count() == 8)
    chart.get_by_role("button", name="Data table").click()
    sizes = bridge.page.evaluate("""[...document.querySelectorAll('[data-view=pays] *, [data-view=compression] text')]
      .filter((e) => e.textContent.trim()).map((e) => parseFloat(getComputedStyle(e).fontSize))""")
    assert len(sizes) > 20 and min(sizes) >= 14
    ARTEFACTS.mkdir(exist_ok=True)
    for theme, paper, ink, line in (("light", "#fff", "#1a1a1a", "#ccc"), ("dark", "#111", "#f2f2f2", "#444")):
        colours = {"layout-color0": paper, "layout-color1": paper, "ui-font-color0": ink, "ui-font-color1": ink,
                   "ui-font-color2": ink, "border-color2": line}  # fmt: skip
        bridge.page.evaluate(
            "([light, paper, colours]) => { document.body.dataset.jpThemeLight = light;"
            "document.body.style.background = paper;"
            "for (const [k, v] of Object.entries(colours)) document.body.style.setProperty(`--jp-${k}`, v); }",
            [str(theme == "light").lower(), paper, colours],
        )
        bridge.settle(3000)
        text.scroll_into_view_if_needed()
        bridge.page.screenshot(path=ARTEFACTS / f"compression-{theme}.png", full_page=True)
    wide = bridge.page.evaluate("[...document.querySelectorAll('.wb-panel')].map((e) => e.scrollWidth - e.clientWidth)")
    assert max(wide) <= 1


TITLES = """[...document.querySelectorAll('.wb-chart')].flatMap((chart) => {
  const boxes = (what) => [...chart.querySelectorAll(what)].map((e) => [e, e.getBoundingClientRect()]);
  const over = (p, q) => Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
    && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1;
  const others = boxes('[class$=tick] text, .nsewdrag');
  return boxes('text:is(.ytitle, .y2title, .y3title)').flatMap(([title, p]) =>
    others.filter(([, q]) => over(p, q)).map(([e]) => `${title.textContent} / ${e.textContent}`));
})"""


def test_on_a_narrow_page_no_axis_titles_overlap_and_no_column_is_cut_off(browser: Any, tmp_path: Path) -> None:
    """A dashboard leaves charts 530 pixels of a page of 1024."""
    e = Experiment(task=ByteGPT(layers=1, width=32, context=32), ranks=2, steps=60, pace=20, measure_every=2,
                   compressor=TopK(), fabric=Fabric(link=Link(bandwidth=1, latency=0.5)), bucket_mb=0.05)  # fmt: skip
    file = write_report(simulate(e, real=True), tmp_path / "run.html")
    page = patient(browser.new_page(viewport={"width": 576, "height": 768}))
    page.goto(file.as_uri())
    for view in ("compression", "collectives"):
        page.locator(f"[data-view={view}]").scroll_into_view_if_needed()
        page.wait_for_timeout(1500)
    page.wait_for_function("document.querySelectorAll('[data-view=compression] text.y3title').length == 1")
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "compression-narrow.png", full_page=True)
    assert page.locator("[data-view=compression] text.y3title").count() == 1
    assert page.evaluate(TITLES) == []
    wide = page.evaluate("""[...document.querySelectorAll('[data-view=collectives] :is(th, td, caption)')].map((e) =>
      e.getBoundingClientRect().right - e.closest('.wb-panel').getBoundingClientRect().right)""")
    assert len(wide) > 20 and max(wide) <= 1
    numbers = page.evaluate("""['', '2', '3'].map((n) => document.querySelectorAll(
      `[data-view=compression] .x${n}tick`).length)""")
    assert min(numbers) >= 2, "an axis with one number has no scale"
