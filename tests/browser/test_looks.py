"""Tests the dashboard in JupyterLab: large and small pages, light and dark, without a kernel."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest

from tests.browser.conftest import PATIENT, Sheet, opened, served
from tests.browser.legible import cut_off, hard_to_read, touching

pytestmark = pytest.mark.browser
CELLS = (
    "from tests.browser.still import still\nfrom widgets import Dashboard\nlab = still()\nDashboard(lab)",
    "lab.end()",
    "lab.hang()",
    "lab.hang('')",
    "import os\nos.getpid()",
)
SIZES = {"large": (1440, 900), "small": (1024, 768), "split": (790, 900)}  # a split pane leaves about 700 px
FIT = """() => [...document.querySelectorAll('.wb-panel .wb-chart')].filter((e) => e.clientWidth && e._fullLayout)
  .every((e) => Math.abs(e._fullLayout.width - e.clientWidth) <= 1)"""
TEXTS = ".wb-legend li", ".wb-mark span", ".wb-head button, .wb-head h3, .wb-tools", ".twb-row > .twb-head > *"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Sheet]:
    """One page for all tests of this file: a notebook whose first cell shows a dashboard."""
    with served(tmp_path_factory.mktemp("looks")) as jupyter, opened(jupyter, request) as sheet:
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS], metadata=kernel)
        nbformat.write(book, jupyter.folder / "look.ipynb")
        sheet.open("look.ipynb")
        show(sheet)
        yield sheet


def show(sheet: Sheet) -> None:
    """Runs the first cell and waits until its charts are drawn."""
    sheet.run("Dashboard(lab)", keys="Control+Enter")
    drawn = "['timeline', 'loss', 'ranks'].every((v) => document.querySelector(`[data-view=${v}]`)?.dataset.draws > 0)"
    sheet.page.wait_for_function(drawn)
    sheet.page.wait_for_timeout(1500)


def sized(sheet: Sheet, size: str) -> None:
    """Sets the page's size, scrolls to the dashboard and waits until the charts have followed."""
    width, height = SIZES[size]
    sheet.page.set_viewport_size({"width": width, "height": height})
    sheet.page.locator(".twb-dashboard").evaluate("(e) => e.scrollIntoView({ block: 'start' })")
    sheet.page.wait_for_function(FIT)
    sheet.page.wait_for_timeout(800)


def fits(sheet: Sheet, seconds: int = 60) -> bool:
    """Waits until the charts are as wide as their places; returns whether they are."""
    for _ in range(10 * seconds):
        if sheet.page.evaluate(FIT):
            return True
        sheet.page.wait_for_timeout(100)
    return False


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_cut_off_and_no_two_texts_touch(shown: Sheet, size: str, theme: str) -> None:
    if shown.page.evaluate("document.body.dataset.jpThemeName") != theme:
        shown.page.set_viewport_size({"width": 1440, "height": 900})  # at this size the menu has room
        shown.theme(theme)
    sized(shown, size)
    assert cut_off(shown.page, ".twb-dashboard") == []
    assert [pair for texts in TEXTS for pair in touching(shown.page, texts)] == []
    assert hard_to_read(shown.page) == []
    shown.shot(f"looks-{size}-{theme.rpartition(' ')[2].lower()}")
    shown.page.locator(".wb-cards").scroll_into_view_if_needed()
    shown.shot(f"looks-{size}-{theme.rpartition(' ')[2].lower()}-cards")
    shown.page.locator(".twb-main").evaluate("(e) => e.scrollTo(0, 0)")


@pytest.mark.parametrize("size", SIZES)
def test_controls_of_single_ranks_and_stacks_are_not_cut_off(shown: Sheet, size: str) -> None:
    sized(shown, size)
    panel = shown.page.locator(".twb-members")
    panel.locator("details").evaluate("(e) => { e.open = true; e.scrollIntoView(); }")
    assert panel.locator("option").all_text_contents() == ["rank 0", "rank 1", "rank 3"]
    panel.locator("select").select_option("3")
    panel.locator("[data-do=evict]").click()
    panel.get_by_text("rank=3: the other ranks cannot go on without it").wait_for()
    shown.run("lab.hang()", keys="Control+Enter")
    alert = shown.page.locator(".twb-alert:visible .twb-stacks")
    alert.wait_for()
    (alert if size == "small" else shown.page.locator(".twb-stacks:visible").first).click()
    box = shown.page.locator(".twb-code:visible textarea")
    box.wait_for()
    assert box.input_value() == "rank 0: in forward of step 5"
    assert cut_off(shown.page, ".twb-members") == [] == cut_off(shown.page, ".twb-transport")
    assert touching(shown.page, ".twb-members button, .twb-members select") == []
    shown.shot(f"members-{size}")
    panel.locator("details").evaluate("(e) => { e.open = false; }")
    shown.page.locator(".twb-code:visible button").click()
    shown.run("lab.hang('')", keys="Control+Enter")
    shown.page.locator(".twb-alert").wait_for(state="hidden")


@pytest.mark.parametrize("size", SIZES)
def test_the_timeline_is_visible_while_any_control_is_used(shown: Sheet, size: str) -> None:
    sized(shown, size)
    seen = """() => {
      const b = document.querySelector('[data-view=timeline] .wb-frame').getBoundingClientRect();
      const at = [0.1, 0.5, 0.9].map((y) => document.elementFromPoint(b.left + b.width / 2, b.top + y * b.height));
      return at.every((e) => e?.closest('[data-view=timeline]'));
    }"""
    rows = shown.page.locator(".twb-controls > .twb-list > .twb-row")
    assert rows.count() >= 7
    for row in rows.all():
        row.locator("input, select").first.focus()
        assert row.is_visible() and shown.page.evaluate(seen), row.get_attribute("data-path")


FOCUSED = """() => {
  const e = document.activeElement, style = getComputedStyle(e), inside = !!e.closest('.twb-dashboard');
  return { inside, name: `${e.tagName} ${e.className} ${e.textContent.slice(0, 20)}`,
    text: e.matches('input[type=text], input:not([type])'), own: !!e.dataset.lmSuppressShortcuts,
    shown: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1 || style.boxShadow !== 'none' };
}"""


def test_tab_reaches_every_control_which_shows_focus_and_keeps_its_keys(shown: Sheet) -> None:
    sized(shown, "large")
    shown.page.locator(".twb-transport button:enabled").first.focus()
    seen: dict[str, dict[str, Any]] = {}
    for _ in range(120):
        shown.page.keyboard.press("Tab")
        now = shown.page.evaluate(FOCUSED)
        if not now["inside"]:
            break
        seen[now["name"]] = now
    assert not now["inside"] and len(seen) > 25
    assert [name for name, at in seen.items() if not at["shown"]] == []
    assert [name for name, at in seen.items() if not at["own"] and not at["text"]] == []
    fold = shown.page.locator(".twb-fold .lm-AccordionPanel-title, .twb-fold .jupyter-widget-Collapse-header").first
    fold.focus()
    if fold.get_attribute("aria-expanded") == "true":  # another test left it open
        shown.page.keyboard.press("Enter")
        shown.page.wait_for_timeout(500)
    shown.page.keyboard.press("Enter")
    slider = shown.page.locator(".twb-whatif .noUi-handle").first
    slider.wait_for()
    slider.focus()
    before = slider.get_attribute("aria-valuenow")
    shown.page.keyboard.press("ArrowRight")
    moved = "([e, before]) => e.getAttribute('aria-valuenow') !== before"
    shown.page.wait_for_function(moved, arg=[slider.element_handle(), before])
    fold.focus()
    shown.page.keyboard.press("Enter")


BEYOND = """[...document.querySelectorAll('.twb-whatif :is(.widget-dropdown, .widget-text, .widget-label)')]
  .filter((e) => e.checkVisibility() && e.clientWidth)
  .filter((e) => e.matches('.widget-label') && e.scrollWidth > e.clientWidth
    || e.getBoundingClientRect().right > e.closest('.twb-whatif').getBoundingClientRect().right)
  .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 20)}`)"""


@pytest.mark.parametrize("size", SIZES)
def test_the_what_if_panel_is_not_cut_off(shown: Sheet, size: str) -> None:
    sized(shown, size)
    title = shown.page.locator(".twb-fold .lm-AccordionPanel-title, .twb-fold .jupyter-widget-Collapse-header").first
    if title.get_attribute("aria-expanded") != "true":
        title.click()
    panel = shown.page.locator(".twb-whatif")
    panel.locator("select").first.wait_for()
    panel.locator("select").last.scroll_into_view_if_needed()
    for speed in ("Home", "End"):
        panel.get_by_role("slider").nth(1).press(speed)
        shown.page.wait_for_timeout(1000)
        assert shown.page.evaluate(BEYOND) == []
    shown.shot(f"looks-{size}-what-if")
    title.click()


def test_a_chart_follows_a_change_of_size_during_its_drawing(shown: Sheet) -> None:
    shown.page.evaluate("""() => {
      const react = Plotly.react, rest = (ms) => new Promise((done) => setTimeout(done, ms));
      Plotly.quick = react;
      Plotly.react = async (...given) => { const made = await react(...given); await rest(300); return made; };
    }""")
    try:
        for width in (1440, 1250, 1040):
            shown.page.set_viewport_size({"width": width, "height": 900})
            shown.page.wait_for_timeout(350)
        sized(shown, "large")
        assert shown.page.evaluate(FIT)
    finally:
        shown.page.evaluate("() => { Plotly.react = Plotly.quick; }")


FOR_A_MOMENT = """() => new Promise((done) => { // another width while the charts are drawn, back before the next frame
  const { style } = document.querySelector('.twb-dashboard');
  requestAnimationFrame(() => { style.width = '800px'; });
  document.body.classList.toggle('drawn-anew');
  setTimeout(() => requestAnimationFrame(() => { style.width = ''; done(); }));
})"""
HIDDEN = """() => new Promise((done) => { // hidden while the charts are drawn that follow a change of width
  const { style } = document.querySelector('.twb-dashboard'), next = requestAnimationFrame;
  style.width = '';
  next(() => next(() => { style.display = 'none'; }));
  new ResizeObserver((_, self) => {
    self.disconnect();
    next(() => { style.display = ''; done(); });
  }).observe(document.querySelector('.wb-board'));
})"""


def test_a_chart_drawn_at_a_temporary_width_is_drawn_again(shown: Sheet) -> None:
    sized(shown, "large")
    shown.page.evaluate(FOR_A_MOMENT)
    assert fits(shown)


def test_a_chart_hidden_at_its_drawing_is_drawn_when_shown_again(shown: Sheet) -> None:
    sized(shown, "large")
    shown.page.locator(".twb-dashboard").evaluate("(e) => { e.style.width = '800px'; }")
    shown.page.wait_for_timeout(1500)
    shown.page.wait_for_function(FIT)
    shown.page.evaluate(HIDDEN)
    assert fits(shown)


def test_compressors_are_listed_by_kind_after_a_few_to_start_with(shown: Sheet) -> None:
    groups = shown.control("compressor").locator("optgroup")
    labels = [group.get_attribute("label") for group in groups.all()]
    assert labels == ["to start with", "casts", "quantised", "sparse", "low rank", "wrappers"]
    first = groups.first.locator("option").all_inner_texts()
    assert first[0] == "Dense" and "TopK + ErrorFeedback" in first and len(first) <= 6


def test_the_box_of_a_step_holds_five_digits(shown: Sheet) -> None:
    box = shown.page.locator("[data-view=timeline] .wb-step").first
    box.evaluate("(e) => { e.max = 99999; e.value = '98765'; }")
    assert box.evaluate("(e) => e.scrollWidth <= e.clientWidth")


def test_the_picture_is_hidden_under_a_live_dashboard_and_saved_with_the_notebook(shown: Sheet) -> None:
    shown.run("lab.end()", keys="Control+Enter")
    cell = shown.page.locator(".jp-CodeCell", has_text="Dashboard(lab)").first
    cell.locator("img").wait_for(state="attached")
    assert not cell.locator("img").is_visible() and shown.page.locator(".twb-dashboard").is_visible()
    shown.save()
    saved = nbformat.read(shown.jupyter.folder / "look.ipynb", as_version=4).cells[0].outputs
    assert ["image/png" in output.get("data", {}) for output in saved] == [False, True]
    assert (shown.jupyter.folder / "look.ipynb").stat().st_size < 450_000


def kernel(sheet: Sheet, method: str, what: str) -> None:
    """Asks the server to act on the notebook's kernel or session."""
    ask = f"{sheet.jupyter.url}/api/{{}}?token={sheet.jupyter.token}"
    with urllib.request.urlopen(ask.format("sessions"), timeout=PATIENT) as answer:
        (session,) = [s for s in json.load(answer) if s["path"] == sheet.name]
    at = f"kernels/{session['kernel']['id']}/{what}" if what else f"sessions/{session['id']}"
    request = urllib.request.Request(ask.format(at), method=method)
    urllib.request.urlopen(request, timeout=PATIENT).close()


def handles(sheet: Sheet) -> dict[str, Any]:
    """Returns the controls that a person can use now."""
    return dict(
        sheet.page.evaluate("""() => ({
      buttons: [...document.querySelectorAll('.twb-transport button:enabled')]
        .filter((b) => b.checkVisibility()).map((b) => b.textContent),
      inert: document.querySelector('.twb-left').inert, said: document.querySelector('.twb-state').textContent })""")
    )


def gone(sheet: Sheet) -> None:
    sheet.page.locator(".twb-state[data-state=gone]").wait_for()
    now = handles(sheet)
    assert now["buttons"] == [] and now["inert"] and "no kernel answers" in now["said"], now
    assert sheet.page.locator(".wb-apart").first.is_visible()


def test_the_page_reports_a_silent_restarted_or_ended_kernel_and_its_return(shown: Sheet) -> None:
    sized(shown, "small")
    shown.run("os.getpid()", keys="Control+Enter")
    cell = shown.page.locator(".jp-CodeCell", has_text="getpid")
    process = int(cell.locator(".jp-OutputArea-output pre").inner_text())
    os.kill(process, signal.SIGSTOP)
    try:
        shown.page.locator(".twb-dashboard").evaluate("(e) => e.scrollIntoView({ block: 'start' })")
        gone(shown)
        shown.shot("looks-kernel-silent")
    finally:
        os.kill(process, signal.SIGCONT)
    shown.page.locator(".twb-state:not([data-state=gone])").wait_for()
    assert "Copy as Python" in handles(shown)["buttons"] and not handles(shown)["inert"]
    assert shown.page.locator(".wb-apart").count() == 0

    kernel(shown, "POST", "restart")
    gone(shown)
    shown.ready()
    shown.run("os.getpid()", keys="Control+Enter")  # otherwise the next cell would get the same number as before
    show(shown)
    assert handles(shown)["buttons"] and "running" in handles(shown)["said"]

    kernel(shown, "DELETE", "")
    gone(shown)
    shown.shot("looks-kernel-gone")
