"""Tests the dashboard in other front ends: docked next to a notebook, in Notebook 7, in VS Code's renderer."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser.conftest import ARTEFACTS, CHROMIUM, FLAGS, PATIENT, Sheet, opened, patient, served
from tests.browser.legible import cut_off, touching

pytestmark = [pytest.mark.browser, pytest.mark.long]
SHOWN = """from tests.browser.still import still
from widgets import Dashboard
lab = still()
dashboard = Dashboard(lab)"""
DRAWN = """() => ['timeline', 'loss', 'ranks'].every((view) =>
  [...document.querySelectorAll(`[data-view=${view}]`)].some((panel) => panel.dataset.draws > 0))"""
DOCKED = """() => {
  const box = (e) => e.getBoundingClientRect();
  const frame = [...document.querySelectorAll('.twb-frame')].find((e) => !e.closest('.jp-NotebookPanel'));
  const panel = box(frame.closest('.jupyterlab-sidecar')), left = box(frame.querySelector('.twb-left'));
  const free = Math.min(left.bottom, panel.bottom, box(frame.querySelector('.twb-help')).top);
  const rows = [...frame.querySelectorAll('.twb-controls > .twb-list > .twb-row')].map(box);
  const seen = rows.filter((r) => r.top >= left.top && r.bottom <= free);
  return { below: panel.bottom - box(frame).bottom, rows: seen.length };
}"""
HTML_MANAGER = "@jupyter-widgets/html-manager@1.0.15"


def notebook(folder: Path, *cells: str) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata=kernel)
    nbformat.write(book, folder / "look.ipynb")


def used(page: Any) -> None:
    """Checks that the dashboard draws, its controls work, and the keyboard reaches its boxes."""
    page.wait_for_function(DRAWN)
    assert "running" in page.locator(".twb-state").first.inner_text()
    row = page.locator(".twb-row[data-path='bucket_mb']").first
    row.locator("input.twb-entry").fill("2.5")
    row.locator("input.twb-entry").press("Enter")
    page.locator(".twb-request.twb-applied", has_text="bucket_mb = 2.5").first.wait_for()
    page.locator("[data-view=timeline] .wb-frame").first.focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
        page.wait_for_timeout(500)
    said = page.locator("[data-view=timeline] .wb-said").first
    page.wait_for_function("(e) => e.textContent.endsWith(', pinned.')", arg=said.element_handle())
    assert said.inner_text().startswith("Rank 0, step ")
    looked_at(page)


def looked_at(page: Any) -> None:
    """Checks that the bar is above the charts in every front end's styles and nothing is cut off."""
    bar, charts = (page.locator(name).first.bounding_box() for name in (".twb-transport", ".wb-board"))
    assert bar["y"] + bar["height"] <= charts["y"] + 1 and bar["width"] >= charts["width"]
    assert cut_off(page, ".twb-dashboard") == []


@contextmanager
def paged(*, width: int = 1440, height: int = 900) -> Iterator[Any]:
    """Yields a page of its own browser; fails if the page reports an error."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = patient(browser.new_page(viewport={"width": width, "height": height}))
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        yield page
        browser.close()
        assert troubles == []


def kept(page: Any, name: str) -> None:
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"front-{name}.png")


def test_a_docked_dashboard_stays_visible_next_to_the_notebook(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("sidecar")
    with served(tmp_path) as jupyter, opened(jupyter, request) as sheet:
        notebook(jupyter.folder, f"{SHOWN}\ndashboard.dock()", *["# more to read\n" * 40] * 3)
        sheet.page.set_viewport_size({"width": 1920, "height": 1000})
        sheet.open("look.ipynb")
        sheet.run("dashboard.dock()", keys="Control+Enter")
        panel = sheet.page.locator(".twb-dashboard:not(.jp-NotebookPanel *)")
        panel.wait_for()
        assert sheet.page.locator(".twb-dashboard").count() == 1  # only in the panel
        used(sheet.page)
        sheet.page.locator(".jp-CodeCell").last.scroll_into_view_if_needed()
        assert panel.is_visible() and sheet.page.locator(".jp-NotebookPanel").first.is_visible()
        sheet.shot("front-docked")
        for width, height in ((1440, 900), (1024, 768)):
            sheet.page.set_viewport_size({"width": width, "height": height})
            sheet.page.wait_for_timeout(1500)
            sheet.shot(f"front-docked-{width}")
            filled = sheet.page.evaluate(DOCKED)
            assert 0 <= filled["below"] <= 12, "a blank band, or something to scroll to"
            assert filled["rows"] >= 4, "of the controls that many can be read and set without scrolling"
            assert touching(sheet.page, ".twb-row > .twb-head > *") == []


def test_notebook_7_shows_the_dashboard_and_its_controls_work(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("notebook")
    with served(tmp_path, "notebook") as jupyter, opened(jupyter, request) as sheet:
        notebook(jupyter.folder, f"{SHOWN}\ndashboard")
        sheet.page.set_viewport_size({"width": 1440, "height": 900})
        sheet.name = "look.ipynb"
        sheet.page.goto(f"{jupyter.url}/notebooks/look.ipynb?token={jupyter.token}")
        sheet.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        _connected(sheet)
        sheet.run("Dashboard(lab)", keys="Control+Enter")
        used(sheet.page)
        sheet.shot("front-notebook-7")


def _connected(sheet: Sheet) -> None:
    end = time.monotonic() + PATIENT
    while not sheet._connected():
        assert time.monotonic() < end, f"the notebook's kernel is not connected after {PATIENT} s"
        sheet.page.wait_for_timeout(200)


# -- VS Code's renderer: jupyter-widgets' html-manager in its own page, with forwarded comms --

PAGE = """<!DOCTYPE html><html><head><meta charset="utf-8"><script>
const modules = {}, waiting = {};
function need(name) { return modules[name] ??= new Promise((done) => { waiting[name] = done; }); }
function define(name, deps, make) {
  if (typeof name !== "string") { make = deps ?? name; deps = Array.isArray(name) ? name : []; name = "anywidget"; }
  const found = deps.map((d) => (d === "module" ? { uri: location.href, id: name } : need(d)));
  const got = Promise.all(found).then((all) => make(...all));
  if (waiting[name]) waiting[name](got); else modules[name] = got;
}
define.amd = {};
window.require = window.requirejs = (names, done, failed) =>
  Promise.all(names.map(need)).then((all) => done?.(...all)).catch(failed ?? reportError);
</script><script src="embed.js"></script><script src="anywidget.js"></script><script type="module">
const { HTMLManager } = await need("@jupyter-widgets/html-manager");
const comms = new Map();
const toBytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
class Comm {
  constructor(id) { this.comm_id = id; this.target_name = "jupyter.widget"; comms.set(id, this); }
  on_msg(call) { this.heard = call; }
  on_close(call) {}
  send(data, callbacks) {
    window.toPython(this.comm_id, data);
    setTimeout(() => callbacks?.iopub?.status?.({ content: { execution_state: "idle" } }));
    return "sent";
  }
  close() {}
}
class Manager extends HTMLManager {
  _create_comm(target, id) { return Promise.resolve(new Comm(id)); }
}
const manager = new Manager({ loader: (name) => need(name) });
let last = Promise.resolve();
window.hear = (kind, id, content, buffers) => {
  const metadata = { version: "2.1.0" };
  const message = { content: { ...content, comm_id: id }, metadata, buffers: buffers.map(toBytes) };
  const open = () => manager.handle_comm_open(new Comm(id), message);
  const hear = () => comms.get(id)?.heard?.(message);
  last = last.then(kind === "open" ? open : hear).catch((error) => console.error(error));
};
window.show = async (id) => {
  await last;
  const view = await manager.create_view(await manager.get_model(id));
  await manager.display_view(view, document.getElementById("shown"));
};
window.ready = true;
</script></head><body><div id="shown"></div></body></html>"""


def html_manager() -> str:
    """Returns the bundle of html-manager from npm."""
    if shutil.which("npm") is None:
        pytest.skip("no npm on this machine")
    place = ARTEFACTS / "html-manager"
    file = place / "package" / "dist" / "embed-amd.js"
    if not file.exists():
        place.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["npm", "pack", HTML_MANAGER], cwd=place, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"npm does not give {HTML_MANAGER}: {done.stderr[-200:]}")
        with tarfile.open(place / done.stdout.split()[-1]) as packed:
            packed.extract("package/dist/embed-amd.js", place, filter="data")
    return file.read_text()


class Wire:
    """Forwards comms between widgets in this process and a page."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page, self.comms, self.out, self.heard = page, dict[str, Any](), list[Any](), list[Any]()
        page.expose_function("toPython", lambda comm, data: self.heard.append((comm, data)))
        (folder / "embed.js").write_text(html_manager())
        import anywidget

        bundle = Path(anywidget.__file__).parent / "nbextension" / "index.js"
        (folder / "anywidget.js").write_text(bundle.read_text())
        (folder / "page.html").write_text(PAGE)
        page.goto((folder / "page.html").as_uri())
        page.wait_for_function("window.ready")

    def made(self, **given: Any) -> Any:
        """Returns the comm of a new widget, as `comm.create_comm` does."""
        from comm.base_comm import BaseComm

        wire = self

        class Carried(BaseComm):
            def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None,
                            **more: Any) -> None:  # fmt: skip
                wire.out.append((msg_type, self.comm_id, data or {}, [bytes(b) for b in buffers or []]))

        found = Carried(**given)
        self.comms[found.comm_id] = found
        return found

    def pump(self, ms: int) -> None:
        """Exchanges messages for `ms` milliseconds."""
        for _ in range(ms // 50):
            while self.heard:
                comm, data = self.heard.pop(0)
                self.comms[comm].handle_msg({"content": {"data": data}, "buffers": []})
            while self.out:
                kind, comm, data, buffers = self.out.pop(0)
                if kind in ("comm_open", "comm_msg"):
                    coded = [base64.b64encode(b).decode() for b in buffers]
                    what = {"data": json.loads(json.dumps(data)), "target_name": "jupyter.widget"}
                    self.page.evaluate("(m) => window.hear(...m)", [kind.removeprefix("comm_"), comm, what, coded])
            self.page.wait_for_timeout(50)

    def until(self, condition: str, seconds: float = PATIENT) -> None:
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not in {seconds} s: {condition}"
            self.pump(200)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_vs_codes_renderer_shows_the_dashboard_and_its_controls_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    import comm

    from tests.browser.still import still
    from widgets import Dashboard

    with paged() as page:
        page.emulate_media(color_scheme=scheme)
        wire = Wire(page, tmp_path)
        monkeypatch.setattr(comm, "create_comm", wire.made)
        lab = still()
        dashboard = Dashboard(lab)
        try:
            wire.pump(200)
            page.evaluate("(id) => void window.show(id)", dashboard.model_id)
            wire.until(f"({DRAWN})()")
            wire.until("document.querySelector('.twb-state').innerText.includes('running')")
            entry = page.locator(".twb-row[data-path='bucket_mb'] input.twb-entry")
            entry.fill("2.5")
            entry.press("Enter")
            wire.until("document.querySelector('.twb-request.twb-applied')?.innerText.includes('bucket_mb = 2.5')")
            page.locator("[data-view=timeline] .wb-frame").focus()
            for key in ("ArrowRight", "ArrowRight", "Enter"):
                page.keyboard.press(key)
                wire.pump(600)
            assert page.locator("[data-view=timeline] .wb-said").inner_text().endswith(", pinned.")
            assert dashboard.state()["pin"]["rank"] == 0
            kept(page, f"html-manager-{scheme}")
            looked_at(page)
        finally:
            dashboard.close()
