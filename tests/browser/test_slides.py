"""Tests a lesson's slides in Chromium without a network: keys, hidden answers, code and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import patient
from tests.browser.test_board import browser as browser
from tests.unit.test_course import lesson, slides

pytestmark = pytest.mark.browser


def test_a_teacher_steps_through_slides_without_a_network(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "06_title.slides.html"
    path.write_text(slides(lesson())[0], "utf8")
    page = patient(browser.new_page(viewport={"width": 1280, "height": 720}))
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else troubles.append(asked.url))
    page.goto(path.as_uri())
    assert page.inner_text("#place") == "1 / 5" and page.is_visible("h1") and not page.is_visible("h2")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("text=How long?") and page.is_visible("li:has-text('yes')")
    assert not page.is_visible("text=guess = Prediction") and not page.is_visible("text=12 ms")
    page.keyboard.press("c")
    assert page.is_visible("text=Prediction(")
    page.keyboard.press("c")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#place") == "3 / 5" and not page.is_visible("text=12 ms"), "the class answers first"
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#place") == "3 / 5" and page.is_visible("text=12 ms")
    page.keyboard.press("ArrowLeft")
    assert not page.is_visible("text=12 ms")
    page.keyboard.press("End")
    page.wait_for_selector(".figure[aria-label=drawn] .bars path", state="attached")
    assert page.url.endswith("#5") and not troubles
