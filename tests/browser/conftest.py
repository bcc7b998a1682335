"""Fixtures of the browser tests: a real JupyterLab and a headless Chromium."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ARTEFACTS = ROOT / "artefacts"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
PATIENT = 120  # seconds, enough for a busy machine
FAILED = pytest.StashKey[bool]()
PLACES = {
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "IPYTHONDIR": "ipython",
    "WORKBENCH_RUNTIME_DIR": "labs",
    "XDG_DATA_HOME": "data",
}


class Jupyter(NamedTuple):
    """A running JupyterLab: its address, its token, its notebooks' folder and the folder of labs' runs."""

    url: str
    token: str
    folder: Path
    data: Path


def private(tmp: Path) -> dict[str, str]:
    """Returns an environment in which Jupyter, IPython and the workbench keep all files under `tmp`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **{k: str(tmp / v) for k, v in PLACES.items()}, "PYTHONPATH": path}


@pytest.fixture
def jupyter(tmp_path: Path) -> Iterator[Jupyter]:
    """JupyterLab with a token, in a temporary folder with copies of the notebooks."""
    with served(tmp_path) as found:
        yield found


@contextmanager
def served(tmp_path: Path, app: str = "jupyterlab") -> Iterator[Jupyter]:
    """Yields a JupyterLab that several tests may share. app: the module, "jupyterlab" or "notebook".

    Kernels communicate through files, whose paths must be short. They do not use ports, because Jupyter chooses ports
    long before it binds them. A kernel died once in 36 tests because another process had taken a port in between.
    """
    with tempfile.TemporaryDirectory(prefix="jupyter-", dir="/tmp") as runtime:
        yield from _served(tmp_path, runtime, app)


def _served(tmp_path: Path, runtime: str, app: str) -> Iterator[Jupyter]:
    folder = tmp_path / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", app, "--no-browser", "--ip=127.0.0.1", "--port=0"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--KernelManager.transport=ipc"]
    _quiet(tmp_path / "config")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    with (tmp_path / "jupyter.log").open("w") as log:
        env = {**private(tmp_path), "JUPYTER_RUNTIME_DIR": runtime}
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = _answers(Path(runtime, f"jpserver-{server.pid}.json"), server, tmp_path / "jupyter.log")
        yield Jupyter(url, token, folder, tmp_path / "data")
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def _quiet(config: Path) -> None:
    """Switches off the question about news, which would cover the notebook."""
    (config / "labconfig").mkdir(parents=True)
    off = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (config / "labconfig" / "page_config.json").write_text(json.dumps(off))


def _answers(said: Path, server: subprocess.Popen[bytes], log: Path) -> str:
    """Waits until the server answers; returns its address, which it writes to a file with its chosen port."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            known = json.loads(said.read_text())
            url = f"http://127.0.0.1:{known['port']}"
            urllib.request.urlopen(f"{url}/api?token={known['token']}", timeout=5).close()
            return url
        except (OSError, ValueError):
            assert server.poll() is None, f"JupyterLab ended: {log.read_text()[-2000:]}"
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer in 120 s: {log.read_text()[-2000:]}")


def patient(page: Any) -> Any:
    """Returns `page` with a longer default timeout."""
    page.set_default_timeout(1000 * PATIENT)
    return page


class Sheet:
    """A notebook open in JupyterLab, used as by a person."""

    def __init__(self, page: Any, jupyter: Jupyter) -> None:
        self.page = patient(page)
        self.jupyter = jupyter
        page.add_locator_handler(page.get_by_text("Select kernel for:"), self._same_kernel)

    def open(self, name: str, *, side_bar: bool = False) -> None:
        self.name = name
        self.page.goto(f"{self.jupyter.url}/lab/tree/{name}?token={self.jupyter.token}")
        self.ready(side_bar)

    def ready(self, side_bar: bool = False) -> None:
        """Waits until the notebook is open and its kernel connected, because earlier key presses are lost."""
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        if not side_bar and self.page.locator("#jp-left-stack").is_visible():
            self.page.keyboard.press("Control+b")
        end = time.monotonic() + PATIENT
        while not self._connected():
            assert time.monotonic() < end, f"the notebook's kernel is not connected after {PATIENT} s"
            self.page.wait_for_timeout(200)
        self.page.wait_for_selector(".jp-NotebookPanel-toolbar [data-status=idle]")

    def _same_kernel(self) -> None:
        """Selects the first tab's kernel if JupyterLab asks a second tab for one, as it sometimes does."""
        dialog = self.page.locator("dialog.jp-Dialog")
        running = [label for label in dialog.locator("option").all_inner_texts() if label.startswith(self.name)]
        if running:
            dialog.locator("select").select_option(label=running[0])
        dialog.get_by_role("button", name="Select Kernel", exact=True).click()

    def _connected(self) -> bool:
        with urllib.request.urlopen(
            f"{self.jupyter.url}/api/sessions?token={self.jupyter.token}", timeout=PATIENT
        ) as answer:
            kernels = [s["kernel"] for s in json.load(answer) if s["path"] == self.name]
        return any(k["connections"] > 0 and k["execution_state"] == "idle" for k in kernels)

    def run(self, *contents: str, keys: str = "Shift+Enter") -> None:
        """Runs the code cells that contain these texts, one by one."""
        for text in contents:
            cell = self.page.locator(".jp-CodeCell", has=self.page.locator(".cm-content", has_text=text)).first
            prompt = cell.locator(".jp-InputPrompt")
            before = prompt.inner_text()
            cell.locator(".cm-content").click()
            self.page.keyboard.press(keys)
            pressed = time.monotonic()
            end = pressed + 150  # a lab's engines start at low priority next to other tests
            while (now := prompt.inner_text()) in (before, "[*]:"):
                assert time.monotonic() < end, f"the cell was not run: {now}"
                if now == before and time.monotonic() > pressed + 20:  # a busy page has lost the key
                    cell.locator(".cm-content").click()
                    self.page.keyboard.press(keys)
                    pressed = time.monotonic()
                self.page.wait_for_timeout(100)

    def save(self) -> None:
        """Saves the notebook and waits until it is on disk."""
        file = self.jupyter.folder / self.name
        before = file.stat().st_mtime_ns
        self.page.get_by_role("menuitem", name="File", exact=True).click()
        self.page.get_by_role("menuitem", name=re.compile("^Save Notebook")).first.click()
        end = time.monotonic() + PATIENT
        while file.stat().st_mtime_ns == before or not file.read_text().strip().endswith("}"):
            assert time.monotonic() < end, f"{file.name} was not saved"
            self.page.wait_for_timeout(100)

    def theme(self, name: str) -> None:
        """Switches JupyterLab's theme, through its menu."""
        before = self.page.evaluate("document.body.dataset.jpThemeName")
        if before == name:
            return
        self.page.get_by_role("menuitem", name="Settings", exact=True).click()
        menu = self.page.locator(".lm-Menu-itemLabel")
        menu.get_by_text("Theme", exact=True).hover()
        menu.get_by_text(name, exact=True).click()
        changed = "(before) => document.body.dataset.jpThemeName !== before"
        self.page.wait_for_function(changed, arg=before)
        self.page.wait_for_timeout(1500)

    def control(self, path: str) -> Any:
        """Returns the row of the control of one knob."""
        return self.page.locator(f".twb-row[data-path='{path}']").first

    def button(self, name: str) -> Any:
        return self.page.locator(".twb-transport").get_by_role("button", name=re.compile(name)).first

    def state(self, text: str, timeout: float = PATIENT) -> None:
        """Waits until the line next to the buttons contains `text`."""
        self.page.locator(".twb-state", has_text=text).first.wait_for(timeout=timeout * 1000)

    def step(self) -> int:
        """Returns the step in the line next to the buttons; -1 before the first."""
        found = re.search(r"step (\d+)", self.page.locator(".twb-state").first.inner_text())
        return int(found.group(1)) if found else -1

    def past(self, step: int, timeout: float = PATIENT) -> None:
        """Waits until the run is past `step`."""
        end = time.monotonic() + timeout
        while self.step() <= step:
            assert time.monotonic() < end, f"still at step {self.step()}"
            self.page.wait_for_timeout(100)

    def shot(self, name: str) -> None:
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"{name}.png")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def sheet(jupyter: Jupyter, request: pytest.FixtureRequest) -> Iterator[Sheet]:
    """A browser page of 1280 x 720 that can open notebooks."""
    with opened(jupyter, request) as found:
        yield found


@contextmanager
def opened(jupyter: Jupyter, request: pytest.FixtureRequest) -> Iterator[Sheet]:
    """Yields a Sheet on a browser page that several tests may share."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        said: list[str] = []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"page error: {error}"))
        found = Sheet(page, jupyter)
        yield found
        if request.node.stash.get(FAILED, False):  # the page is gone a moment later
            found.shot(f"failed-{request.node.name}")
            print(*said[-40:], (jupyter.folder.parent / "jupyter.log").read_text()[-3000:], sep="\n")
        browser.close()
