"""Puts tags into every text of a record and checks in a browser that they are shown, never executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import patient
from tests.browser.test_board import Bridge
from tests.browser.test_board import browser as browser
from tests.unit.synthetic import run as recorded
from widgets.controls.transport import Transport
from widgets.export.report import write_report
from workbench.record.marks import FIELDS, MUST
from workbench.record.timeline import Mark, Sample, Span
from workbench.run import Run

pytestmark = pytest.mark.browser

TAG = """<img src=x onerror="window.owned='{}'"><script>window.owned='{}'</script><svg onload="window.owned='{}'">"""
LINK = """<a href="javascript:window.owned='link'">go</a><b style="position:fixed">"""
OTHERS = ("log", "policy", "left", "estimate", "own", "residual", "optimizer", "momentum", "fault", "checkpoint")
TEXTS = ("text", "stream", "what", "strategy", "detail", "op", "host", "device")
BAR = """<!DOCTYPE html><body><div id="bar"></div><script type="module">
{js}
const traits = JSON.parse(atob("{traits}"));
const model = {{ get: (k) => traits[k], on: () => {{}}, off: () => {{}}, send: () => {{}} }};
made.render({{ model, el: document.getElementById("bar") }});
</script></body>"""


def tag(where: str) -> str:
    return TAG.format(where, where, where) + LINK


def marks() -> list[Mark]:
    """Returns a mark with a tag in every name and text field, and a mark whose name looks like a tag."""
    whole = {"nbytes": [10], "ranks": [0, 1], "dims": {tag("dims"): 2}, "inside": [tag("inside")], "serve": [],
             "texts": [tag("texts")], "seconds": 1.0, "rank": 0, "step": 3, "met": False, "takes_ms": 5.0,
             "asked_ms": 1.0, "stages": 1, "slices": 1, "parameters": 10, "stands_for": 1, "clock_error": 0.0,
             "clock_offset": 0.0, "steps": 5, "first": 2,
             "lost": 1, "requested_at": 0.0}  # fmt: skip
    found = []
    for n, name in enumerate([*dict.fromkeys([*FIELDS, *MUST, *OTHERS]), tag("mark")]):
        about = {k: whole.get(k, tag(f"{name}.{k}")) for k in {*FIELDS.get(name, {}), *MUST.get(name, ())}}
        about |= {k: tag(f"{name}.{k}") for k in TEXTS} | ({"nbytes": 10} if name in ("start", "change") else {})
        about |= {"value": tag(f"{name}.value")} if name in ("change", "refused") else {}
        found.append(Mark(0, 3 + n, name, 0.6 + 0.01 * n, json.dumps(about)))
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A record with tags, as a stranger may write it, opened from disk."""
    made = recorded(ranks=2, steps=60)
    made.name, made.started = tag("name"), tag("started")
    made.settings |= {"note": tag("note"), "strategy": {"DDP": {"every": tag("knob")}}}
    made._environment |= {"host": tag("host"), tag("environment"): {tag("k"): [tag("v")]}}
    made.timeline.marks.add(marks())
    for step in range(20, 60):
        t = 0.5 + 0.1 * step
        for lane in ("compute", "comm", tag("lane")):
            made.timeline.spans.add([Span(0, step, lane, tag(f"span {lane[:4]}"), t, t, t + 0.01, 100)])
        made.timeline.samples.add([Sample(0, step, tag("sample"), t, 1.0)])
    opened = Run.open(made.save(tmp_path / "run"))
    assert not opened.warnings and len(opened.marks) == len(made.marks), "all of it is taken for a record"
    return opened


def untouched(page: Any) -> None:
    """Checks that the page executed no tag and that no tag became an element."""
    page.wait_for_timeout(300)
    assert page.evaluate("window.owned ?? null") is None
    inside = "[...document.querySelectorAll('*')].flatMap((e) => [e, ...(e.shadowRoot?.querySelectorAll('*') ?? [])])"
    bad = f"{inside}.filter((e) => e.matches('img[src=x], [onerror], [onload], a[href^=javascript], b[style]')).length"
    assert page.evaluate(bad) == 0
    assert page.evaluate("[...document.scripts].filter((s) => s.textContent.startsWith('window.owned')).length") == 0


def looked_at(page: Any) -> None:
    """Opens everything that opens, and points at everything with a tip."""
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_timeout(500)
    for frame in page.locator(".wb-frame").all():
        if frame.is_visible():
            frame.focus()
            for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight"):
                page.keyboard.press(key)
                page.wait_for_timeout(40)
    for view in page.locator("[data-view]").all():
        if view.is_visible() and (box := view.bounding_box()):
            for k in range(1, 6):
                page.mouse.move(box["x"] + box["width"] * k / 6, box["y"] + box["height"] / 2)
                page.wait_for_timeout(40)


def test_a_report_shows_tags_as_text(browser: Any, tmp_path: Path, run: Run) -> None:
    page = patient(browser.new_page(viewport={"width": 1280, "height": 900}))
    page.goto(write_report(run, tmp_path / "report.html").as_uri())
    page.locator("[data-view=timeline][data-draws]").wait_for()
    looked_at(page)
    untouched(page)
    text = page.evaluate("document.body.textContent")
    for where in ("name", "started", "change.by", "log.text", "error.traceback", "refused.path", "dims", "texts"):
        assert f"window.owned='{where}'" in text, f"{where} is shown as it is"


def test_a_board_shows_tags_as_text(browser: Any, tmp_path: Path, run: Run) -> None:
    bridge = Bridge(browser, tmp_path, run)
    bridge.drawn("timeline", "loss")
    bridge.page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    bridge.settle(1000)
    looked_at(bridge.page)
    bridge.settle(500)
    untouched(bridge.page)


def test_the_bar_of_a_lab_shows_tags_as_text(browser: Any, tmp_path: Path) -> None:
    from base64 import b64encode

    traits = {"may": {}, "why": {"start": tag("why")}, "state": "failed", "line": tag("line"),
              "error": {"title": tag("title"), "text": tag("text"), "more": tag("more")}}  # fmt: skip
    js = str(Transport._esm).replace("export default", "const made =")
    (tmp_path / "bar.html").write_text(BAR.format(js=js, traits=b64encode(json.dumps(traits).encode()).decode()))
    page = patient(browser.new_page())
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto((tmp_path / "bar.html").as_uri())
    page.locator(".twb-state").wait_for()
    looked_at(page)
    untouched(page)
    text = page.evaluate("document.body.innerText")
    assert not troubles and all(f"window.owned='{where}'" in text for where in ("line", "title", "text", "more"))
