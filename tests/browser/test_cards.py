"""Tests cards and rates in Chromium: no column is cut off; pointer and table show the same number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import patient
from tests.browser.test_board import Bridge
from tests.browser.test_board import browser as browser
from tests.sim.virtual import paced, stack
from tests.unit.synthetic import run as recorded
from widgets.export.report import write_report
from workbench import simulate
from workbench.fabric import Slow

pytestmark = pytest.mark.browser

WHERE = """([t, rank]) => {
  const chart = document.querySelector('[data-view=timeline] .wb-chart'), { xaxis, yaxis } = chart._fullLayout;
  const box = chart.getBoundingClientRect();
  return [box.left + xaxis._offset + xaxis.l2p(t), box.top + yaxis._offset + yaxis.l2p(rank + 0.15)];
}"""


def test_pointer_and_table_show_the_links_rate(browser: Any, tmp_path: Path) -> None:
    late = (Slow(rank=1, factor=3.0, phase="forward"),)
    run = simulate(paced(3, 8, 60.0, 100.0, task=stack(4, 300), faults=late, eval_every=0))
    bridge = Bridge(browser, tmp_path, run)
    bridge.drawn("timeline")
    panel = bridge.page.locator("[data-view=timeline]")
    panel.locator("input[type=number]").fill("5")
    panel.locator("input[type=number]").press("Enter")
    bridge.until(lambda: bridge.fact("timeline", "first-step") == 5)
    bridge.settle(1000)
    panel.get_by_role("button", name="Data table").click()
    bridge.until(lambda: panel.locator("tbody tr").count())
    spans = run.timeline.spans.rows()
    mine = spans[spans.equal("lane", "comm") & (spans.step == 5) & (spans.rank == 0) & (spans.t0 < spans.t0.max())]
    first = mine[:1]
    x, y = bridge.page.evaluate(WHERE, [float(first.t1[0]) - 0.005, 0])
    bridge.page.mouse.move(x, y)
    tip = panel.locator(".wb-tip")
    tip.wait_for()
    rows = [r.locator("td").all_inner_texts() for r in panel.locator("tbody tr").all()]
    (told,) = (r[-1] for r in rows if r[:4] == ["5", "0", "comm", str(first.name[0])])
    assert f"{told} Mbit/s" in tip.inner_text().splitlines() and float(told) == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768)])
def test_no_column_of_a_card_is_cut_off(browser: Any, tmp_path: Path, width: int, height: int) -> None:
    changes = ((60, "strategy", "LocalSGD"), (90, "strategy.every", 16), (118, "lr", 0.1))
    file = write_report(recorded(steps=120, ranks=2, changes=changes), tmp_path / "run.html")
    page = patient(browser.new_page(viewport={"width": width, "height": height}))
    page.goto(file.as_uri())
    page.wait_for_selector("[data-view=cards] table")
    ends = page.evaluate("""[...document.querySelectorAll('[data-view=cards] :is(td, th)')].map((e) =>
      e.getBoundingClientRect().right - e.closest('.wb-panel').getBoundingClientRect().right)""")
    assert len(ends) > 40 and max(ends) <= 0
    cards = page.evaluate("[...document.querySelectorAll('.wb-card')].map((e) => e.getBoundingClientRect().width)")
    assert max(cards) <= 690, "what half of a notebook leaves"
