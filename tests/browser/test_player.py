"""Tests the player in Chromium: a report without a kernel shows the board at a chosen time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import patient
from tests.browser.test_board import browser as browser
from tests.unit.synthetic import run as recorded
from widgets.export.report import write_report

pytestmark = pytest.mark.browser
AT = """(t) => {
  const film = document.querySelector('.wb-film');
  film.value = t;
  film.dispatchEvent(new Event('input'));
  film.dispatchEvent(new Event('change'));
}"""
LONGEST = """() => Math.max(
  ...document.querySelector('[data-view=loss] .wb-chart').data.map((d) => Math.max(...d.x, 0)))"""
END = "document.querySelector('.wb-moment').textContent.startsWith('step 199 of 199')"


def test_a_report_shows_an_earlier_moment_and_plays_on(browser: Any, tmp_path: Path) -> None:
    run = recorded(steps=200, changes=((100, "strategy", "LocalSGD"), (150, "strategy.every", 16)))
    page = patient(browser.new_page(viewport={"width": 1280, "height": 900}))
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(write_report(run, tmp_path / "run.html").as_uri())
    page.wait_for_selector("[data-view=loss][data-draws]")
    ended = run.spans[run.spans["lane"] == "step"].groupby("step").t1.max()
    page.evaluate(AT, float(ended[120]) + 1e-4)
    page.wait_for_function(f"({LONGEST})() === 120")
    said = page.inner_text(".wb-player")
    assert "step 120 of 199" in said and "LocalSGD() since step 100" in said and "strategy.every" not in said
    page.wait_for_function("document.querySelector('[data-view=timeline]').dataset.firstStep >= 115")
    assert int(page.get_attribute("[data-view=timeline]", "data-first-step")) <= 125
    assert "every" not in page.get_attribute("[data-view=loss]", "data-marks")
    page.select_option(".wb-player select", "100")
    page.click(".wb-play")
    page.wait_for_function(END)
    page.wait_for_function(f"({LONGEST})() >= 199")
    assert page.inner_text(".wb-play") == "▶ Play"
    assert "strategy.every 16 since step 150" in page.inner_text(".wb-player")
    assert not troubles


def test_a_pages_address_contains_its_moment_and_opens_there(browser: Any, tmp_path: Path) -> None:
    run = recorded(steps=200, changes=())
    moment = float(run.spans[run.spans["lane"] == "step"].groupby("step").t1.max()[120]) + 1e-2
    page, other = (browser.new_page(viewport={"width": 1280, "height": 900}) for _ in range(2))
    page.goto(write_report(run, tmp_path / "run.html").as_uri())
    page.wait_for_selector("[data-view=loss][data-draws]")
    page.evaluate(AT, moment)
    assert page.url.endswith(f"/run.html#at={moment:.3f}")
    other.goto(page.url)
    other.wait_for_selector("[data-view=loss][data-draws]")
    other.wait_for_function(f"({LONGEST})() === 120", timeout=20_000)
    assert "step 120 of 199" in other.inner_text(".wb-player")
    page.get_by_role("button", name="Show whole run").click()
    assert page.url.endswith("/run.html")
