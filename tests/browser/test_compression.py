"""The compression panels in real Chromium: there when something is compressed, legible in light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import ARTEFACTS
from tests.browser.test_board import Bridge, part
from tests.browser.test_board import browser as browser
from tests.unit.encoded import DENSE, SLOW, TOPK, WHOLE, Author
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
    assert "Nothing is compressed" in text.inner_text() and not chart.is_visible()
    part(author.run, 99.0, live, dense - 1e-6)
    bridge.drawn("compression")
    bridge.settle(3000)
    assert "on this link Dense would be faster" in text.inner_text()
    assert bridge.fact("compression", "points") == [40, 8, 8, 8]
    assert bridge.fact("compression", "marks") == ["TopK(density=0.01)"]
    chart.get_by_role("button", name="Data table").click()
    bridge.settle(300)
    assert chart.locator("tbody tr").count() == 8
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
