"""Checks in Chromium that the board draws exactly the record: live, after a reload and from a file."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.conftest import ARTEFACTS, CHROMIUM, FLAGS, PATIENT, patient
from tests.unit.synthetic import run as recorded
from widgets.charts.board import PAGE_CSS, PAGE_JS, Board
from widgets.export.report import write_report
from workbench.run import Run

pytestmark = pytest.mark.browser

PAGE = """<!DOCTYPE html><html><head><style>{css}</style></head>
<body data-jp-theme-light="true" style="--jp-layout-color0: #fff"><div id="board"></div><script type="module">
{js}
const hearers = new Set();
const model = {{ on: (_, f) => hearers.add(f), off: (_, f) => hearers.delete(f), send: (m) => window.toPython(m) }};
window.hear = (content, buffers) => hearers.forEach((f) => f(content,
  buffers.map((b) => new DataView(Uint8Array.from(atob(b), (c) => c.charCodeAt(0)).buffer))));
const shown = board();
shown.initialize({{ model }});
shown.render({{ el: document.getElementById("board") }});
</script></body></html>"""


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


class Bridge:
    """A Board and a page that exchange messages without Jupyter between them."""

    def __init__(self, browser: Any, folder: Path, run: Run) -> None:
        self.board = Board(run)
        self.out: list[tuple[dict[str, Any], list[bytes]]] = []
        self.heard: list[dict[str, Any]] = []
        self.board.send = lambda content, buffers=None: self.out.append((content, buffers or []))  # type: ignore[method-assign]
        self.page = patient(browser.new_page(viewport={"width": 1280, "height": 720}))
        self.troubles: list[str] = []
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.expose_function("toPython", lambda said: self.heard.append(said))
        file = folder / "board.html"
        file.write_text(PAGE.format(css=PAGE_CSS, js=PAGE_JS.replace("export default", "const board =")))
        self.page.goto(file.as_uri())

    def settle(self, ms: int = 1500) -> None:
        """Exchanges messages for `ms` milliseconds."""
        for _ in range(ms // 50):
            for said in self.heard:
                self.board._receive_message(None, said, [])
            self.heard.clear()
            self.board.send_news()
            for content, buffers in self.out:
                plain = json.loads(json.dumps(content))
                self.page.evaluate(
                    "([c, b]) => window.hear(c, b)", [plain, [base64.b64encode(b).decode() for b in buffers]]
                )
            self.out.clear()
            self.page.wait_for_timeout(50)
        assert self.troubles == []

    def until(self, so: Callable[[], Any], what: str = "") -> None:
        """Exchanges messages until `so()` holds."""
        end = time.monotonic() + PATIENT
        while not so():
            assert time.monotonic() < end, what or "not in time"
            self.settle(200)

    def drawn(self, *views: str) -> None:
        """Exchanges messages until these views (default: all with a figure) have been drawn."""
        wanted = views or ("timeline", "loss", "ranks", "bytes", "drift")
        self.until(lambda: all(self.fact(view, "draws") for view in wanted), "not drawn in time")
        self.settle(500)

    def fact(self, view: str, name: str) -> Any:
        panel = self.page.locator(f"[data-view={view}]")
        text = panel.get_attribute(f"data-{name}") if panel.count() else None
        return json.loads(text) if text else None


def part(whole: Run, until: float, live: Run, since: float = -1.0) -> None:
    """Gives `live` the rows of `whole` that ended in (since, until]."""
    for kind, column in (("spans", "t1"), ("samples", "t"), ("marks", "t")):
        rows = whole.timeline.table(kind).rows()
        t = getattr(rows, column)
        live.timeline.table(kind).extend(rows[(t > since) & (t <= until)].columns)


def test_the_page_draws_new_rows_and_a_reload_shows_them_from_the_first_step(browser: Any, tmp_path: Path) -> None:
    whole, live = recorded(steps=130, ranks=3), Run({"ranks": 3}, live=True)
    end = float(whole.timeline.spans.rows().t1.max())
    part(whole, end / 2, live)
    bridge = Bridge(browser, tmp_path, live)
    bridge.drawn("timeline", "loss")
    first = bridge.fact("timeline", "newest-step")
    for k in range(5):
        part(whole, end * (6 + k) / 10, live, end * (5 + k) / 10)
        bridge.settle(800)
    loss = int((whole.samples.name == "loss").sum()) // 3
    held = int((whole.samples.name == "held_out").sum())
    points = [loss] * 6 + [held] * 2  # no checkpoint was made
    bridge.until(lambda: [n for n in bridge.fact("loss", "points") if n] == points)
    bridge.until(lambda: bridge.fact("timeline", "newest-step") == 129)
    assert first < 129 and bridge.fact("loss", "marks") == ["LocalSGD"]
    assert 0 < bridge.fact("timeline", "spans") <= len(whole.spans)
    bridge.page.reload()
    bridge.settle(200)
    bridge.drawn("timeline", "loss")
    assert [n for n in bridge.fact("loss", "points") if n] == points
    assert bridge.fact("loss", "marks") == ["LocalSGD"] and bridge.fact("timeline", "newest-step") == 129


def test_a_hidden_board_receives_nothing_and_catches_up_when_shown(browser: Any, tmp_path: Path) -> None:
    whole, live = recorded(steps=60, ranks=2), Run({"ranks": 2}, live=True)
    part(whole, 3.0, live)
    bridge = Bridge(browser, tmp_path, live)
    bridge.drawn("timeline")
    bridge.page.evaluate("document.getElementById('board').style.display = 'none'")
    bridge.until(lambda: not bridge.board.shown)
    part(whole, 99.0, live, 3.0)
    assert not bridge.board.send_news()
    bridge.page.evaluate("document.getElementById('board').style.display = ''")
    bridge.until(lambda: bridge.fact("timeline", "newest-step") == 59)


def test_a_step_can_be_held_and_the_pointer_shows_its_number(browser: Any, tmp_path: Path) -> None:
    run = recorded(steps=80, ranks=2)
    bridge = Bridge(browser, tmp_path, run)
    bridge.drawn("timeline")
    box = bridge.page.get_by_label("step ", exact=False).and_(bridge.page.locator("input[type=number]"))
    box.fill("12")
    box.press("Enter")
    bridge.until(lambda: bridge.fact("timeline", "first-step") == 12)
    bridge.settle(500)
    drag = bridge.page.locator("[data-view=timeline] .nsewdrag").bounding_box()
    bridge.page.mouse.move(drag["x"] + 30, drag["y"] + 20)
    tip = bridge.page.locator("[data-view=timeline] .wb-tip")
    tip.wait_for()
    rows = run.timeline.spans.rows()
    mine = rows[rows.equal("name", "forward") & (rows.step == 12) & (rows.rank == 0)]
    assert "forward" in tip.inner_text() and "rank 0, step 12" in tip.inner_text()
    assert f"{1e3 * float((mine.t1 - mine.t0)[0]):.3g} ms" in tip.inner_text()


def test_charts_follow_the_theme_have_names_and_tables_and_text_of_14_px(browser: Any, tmp_path: Path) -> None:
    bridge = Bridge(browser, tmp_path, recorded(steps=120, ranks=2))
    bridge.drawn()
    tick = "getComputedStyle(document.querySelector('[data-view=loss] .xtick text')).fill"
    light = bridge.page.evaluate(tick)
    bridge.page.evaluate("document.body.dataset.jpThemeLight = 'false'; document.body.style.background = '#111'")
    bridge.until(lambda: bridge.page.evaluate(tick) == "rgb(242, 242, 242)")
    bridge.settle(1000)
    assert light == "rgb(26, 26, 26)"
    sizes = bridge.page.evaluate("""[...document.querySelectorAll('.wb-board text, .wb-board :is(p, li, td, span)')]
      .filter((e) => e.textContent.trim()).map((e) => parseFloat(getComputedStyle(e).fontSize))""")
    assert len(sizes) > 50 and min(sizes) >= 14
    for view in ("timeline", "loss", "ranks", "bytes", "drift"):
        panel = bridge.page.locator(f"[data-view={view}]")
        assert len(panel.get_attribute("aria-label") or "") > 40
        panel.get_by_role("button", name="Data table").click()
        bridge.until(lambda panel=panel: panel.locator("tbody tr").count() > 0)


def test_with_reduced_motion_the_charts_move_once_a_second_at_most(browser: Any, tmp_path: Path) -> None:
    whole, live = recorded(steps=130, ranks=2), Run({"ranks": 2}, live=True)
    part(whole, 3.0, live)
    bridge = Bridge(browser, tmp_path, live)
    bridge.page.emulate_media(reduced_motion="reduce")
    bridge.drawn("timeline")
    before, began = bridge.fact("timeline", "draws"), time.monotonic()
    for k in range(20):
        part(whole, 3.2 + 0.2 * k, live, 3.0 + 0.2 * k)
        bridge.settle(200)
    bridge.until(lambda: bridge.fact("timeline", "draws") - before >= 2)
    drawn, seconds = bridge.fact("timeline", "draws") - before, time.monotonic() - began
    assert drawn <= seconds + 1


@pytest.mark.parametrize(("scheme", "width", "height"), [("light", 1280, 720), ("dark", 1600, 900)])
def test_a_report_opens_from_disk_and_shows_the_run(
    browser: Any, tmp_path: Path, scheme: str, width: int, height: int
) -> None:
    run = recorded(steps=220, slow=(2, "backward", 1.5), slow_from=160)
    file = write_report(run, tmp_path / "run.html")
    page = patient(browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_function("document.querySelector('[data-view=loss]')?.dataset.marks")
    held = int((run.samples.name == "held_out").sum())
    points = "JSON.parse(document.querySelector('[data-view=loss]').dataset.points).filter((n) => n)"
    page.wait_for_function(f"{points}.slice(-2).join() == '{held},{held}'")
    page.wait_for_function("document.querySelectorAll('[data-view=cards] table').length == 2")
    page.wait_for_timeout(1500)
    assert json.loads(page.locator("[data-view=loss]").get_attribute("data-marks")) == ["LocalSGD", "every = 16"]
    page.get_by_label("Step shown").fill("100")
    page.wait_for_function("Math.abs(document.querySelector('[data-view=timeline]').dataset.firstStep - 100) <= 2")
    assert not [url for url in asked if url.startswith("http")]
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"report-{scheme}-{width}.png", full_page=True)
    assert np.all(
        np.array(page.evaluate("[...document.querySelectorAll('.wb-panel')].map((e) => e.scrollWidth - e.clientWidth)"))
        <= 1
    )


def test_a_page_whose_first_message_is_lost_still_shows_a_finished_run(browser: Any, tmp_path: Path) -> None:
    bridge = Bridge(browser, tmp_path, recorded(steps=40, ranks=2))
    bridge.drawn("timeline", "loss")
    bridge.page.reload()
    for _ in range(10 * PATIENT):
        if "hello" in (heard := [said["kind"] for said in bridge.heard]):
            break
        bridge.page.wait_for_timeout(100)
    assert "hello" in heard
    bridge.heard[:] = [said for said in bridge.heard if said["kind"] != "hello"]
    bridge.drawn("timeline", "loss")
    assert bridge.fact("timeline", "newest-step") == 39
