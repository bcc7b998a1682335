"""Measures the dashboard in a real JupyterLab: bytes to the page, redraws, processor time, memory.

    python -m tests.bench.dashboard_budget --seconds 120 --out docs/data/dashboard.json
    python -m tests.bench.dashboard_budget --real --seconds 60 --out docs/data/dashboard_real.json

A separate process (dashboard_source.py) sends rows of 8 ranks at 20 steps/s (`--ranks 64`: of more). The output has the
raw samples, one for each websocket frame, redraw and heap measurement, and the numbers under "results" from them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]
CELL = """import os
from tests.bench.dashboard_source import live_run
from widgets.page.dashboard import Dashboard
run = live_run(ranks={ranks})
print("pid", os.getpid())
board = Dashboard(run)
board"""
REAL = """import os
from workbench import Lab
from widgets.page.dashboard import Dashboard
lab = Lab(ranks=4, name="budget")
lab.set("fabric.link.bandwidth", 200)
run = lab.run()
print("pid", os.getpid())
Dashboard(lab)"""
LISTEN = """() => { window.draws = []; document.addEventListener("board-drawn", (e) => window.draws.push(
  [e.detail.now, e.detail.newest, e.detail.view, e.detail.rows])); }"""
BUDGETS = {
    "kB/s to the page": ("<=", 300.0),
    "messages/s to the page": ("<=", 40.0),
    "redraws/s with new rows": (">=", 5.0),
    "age of the newest drawn row, p95 (s)": ("<=", 1.0),
    "kernel CPU (share of a core)": ("<=", 0.25),
    "JS heap at the end over halfway": ("<=", 1.15),
    "saved notebook with widget state (MB)": ("<=", 1.0),
}


def serve(folder: Path, source: str) -> tuple[subprocess.Popen[bytes], str]:
    """Starts JupyterLab on a free port with all its files under `folder`; notebooks save widget state."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    (folder / "bench.ipynb").write_text(
        json.dumps({"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
    )
    (folder / "config" / "labconfig").mkdir(parents=True)
    off = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (folder / "config" / "labconfig" / "page_config.json").write_text(json.dumps(off))
    settings = folder / "settings" / "@jupyter-widgets" / "jupyterlab-manager"
    settings.mkdir(parents=True)
    (settings / "plugin.jupyterlab-settings").write_text('{"saveState": true}')
    kept = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTERLAB_SETTINGS_DIR": "settings",
            "IPYTHONDIR": "ipython", "XDG_DATA_HOME": "data"}  # fmt: skip
    env = {**os.environ, **{k: str(folder / v) for k, v in kept.items()}, "PYTHONPATH": str(ROOT)}
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{url}/api?token={token}", timeout=2).close()
            return server, f"{url}/lab/tree/bench.ipynb?token={token}"
        except OSError:
            time.sleep(0.2)
    raise RuntimeError((folder / "log").read_text()[-2000:])


class Page:
    """The notebook in Chromium; records the frames on its websocket."""

    def __init__(self, browser: Any, url: str, size: tuple[int, int]) -> None:
        self.frames: list[tuple[float, int]] = []
        self.troubles: list[str] = []
        self.page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        self.page.on("websocket", lambda ws: "/channels" in ws.url and ws.on("framereceived", self._heard))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.goto(url)
        self.cdp = self.page.context.new_cdp_session(self.page)

    def _heard(self, frame: Any) -> None:
        self.frames.append((time.time(), len(frame)))

    def start(self) -> int:
        """Runs the cell; returns the kernel's pid once charts are drawn."""
        self.page.wait_for_selector(".jp-NotebookPanel-toolbar [data-status=idle]", timeout=90_000)
        if self.page.locator("#jp-left-stack").is_visible():
            self.page.keyboard.press("Control+b")
        self.page.evaluate(LISTEN)
        said = self.page.locator(".jp-OutputArea-output", has_text="pid").first
        begun = self.page.locator(".jp-CodeCell .jp-InputPrompt").first
        for _ in range(6):  # JupyterLab forgets a cell that runs while the kernel connects
            self.page.locator(".jp-CodeCell .cm-content").first.click()
            self.page.keyboard.press("Shift+Enter")
            self.page.wait_for_timeout(4000)
            if begun.inner_text().strip() != "[ ]:":
                break
        pid = said.inner_text(timeout=60_000).split()[1]
        self.page.wait_for_function("document.querySelector('[data-view=timeline]')?.dataset.spans > 0", timeout=60_000)
        self.page.locator("[data-view=timeline]").scroll_into_view_if_needed()
        return int(pid)

    def heap(self) -> float:
        """Returns MB of the JS heap after a forced collection."""
        for _ in range(2):
            self.cdp.send("HeapProfiler.collectGarbage")
        return self.cdp.send("Runtime.getHeapUsage")["usedSize"] / 1e6

    def save(self, file: Path) -> float:
        self.page.locator(".jp-Notebook").first.click(position={"x": 5, "y": 5})
        before = file.stat().st_mtime
        self.page.keyboard.press("Control+s")
        for _ in range(50):
            self.page.wait_for_timeout(200)
            if file.stat().st_mtime > before and file.stat().st_size:
                break
        self.page.wait_for_timeout(1000)
        return file.stat().st_size / 1e6


def measure(seconds: float, shots: Path | None, size: tuple[int, int], source: str) -> dict[str, Any]:
    """Runs the dashboard once under load; returns raw samples and results."""
    from playwright.sync_api import sync_playwright

    folder = Path(tempfile.mkdtemp(prefix="budget-"))
    server, url = serve(folder, source)
    try:
        with sync_playwright() as play:
            chromium = shutil.which("chromium") or shutil.which("google-chrome")
            browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
            raw = _watch(Page(browser, url, size), seconds, shots, folder, source != REAL)
            browser.close()
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
    return raw


def _watch(page: Page, seconds: float, shots: Path | None, folder: Path, made_up: bool) -> dict[str, Any]:
    pid = page.start()
    page.page.wait_for_timeout(5000)  # plotly.js and the first drawing are no steady state
    kernel = psutil.Process(pid)
    begin, cpu, heaps = time.time(), [(time.time(), sum(kernel.cpu_times()[:2]))], []
    while time.time() < begin + seconds:
        page.page.wait_for_timeout(1000)
        cpu.append((time.time(), sum(kernel.cpu_times()[:2])))
        if len(heaps) < 1 and time.time() >= begin + seconds / 2:
            heaps.append((time.time() - begin, page.heap(), time.time() - begin))  # from, MB, until
    end = time.time()
    heaps.append((end - begin, page.heap(), time.time() - begin))
    draws = [d for d in page.page.evaluate("window.draws") if begin <= d[0] <= end]
    if shots:
        page.page.screenshot(path=shots)
    size = page.save(folder / "bench.ipynb")
    frames = [(round(t - begin, 3), n) for t, n in page.frames if begin <= t <= end]
    drawn = [[round(d[0] - begin, 3), round(d[0] - d[1], 3), d[2]] for d in draws]  # when, age of its newest row
    raw = {
        "seconds": end - begin, "frames": frames, "draws": drawn,
        "cpu": [[round(t - begin, 2), round(c - cpu[0][1], 2)] for t, c in cpu], "heap_mb": heaps, "notebook_mb": size,
        "trouble": page.troubles, "load": [list(os.getloadavg())],
    }  # fmt: skip
    budgets = {name: limit for name, limit in BUDGETS.items() if made_up or "redraws" not in name}
    return {"results": {k: v for k, v in results(raw).items() if k in budgets}, "budgets": budgets, "raw": raw}


def results(raw: dict[str, Any]) -> dict[str, float]:
    """Computes the budgets' numbers from the raw samples."""
    seconds = raw["seconds"]
    fresh, newest = [], -1e9
    for t, age, _ in raw["draws"]:
        if t - age > newest + 1e-6:
            newest = t - age
            fresh.append((t, newest))
    at, rows = np.array(fresh).T if fresh else (np.zeros(1), np.zeros(1))
    ticks = np.arange(at[0], at[-1], 0.02)
    for since, _, until in raw["heap_mb"]:  # the page stops during a forced collection
        ticks = ticks[(ticks < since) | (ticks > until + 0.5)]
    age = ticks - rows[np.searchsorted(at, ticks, side="right") - 1]
    return {
        "kB/s to the page": sum(n for _, n in raw["frames"]) / 1e3 / seconds,
        "messages/s to the page": len(raw["frames"]) / seconds,
        "redraws/s with new rows": len(fresh) / seconds,
        "age of the newest drawn row, p95 (s)": float(np.quantile(age, 0.95)) if len(age) else float("inf"),
        "kernel CPU (share of a core)": raw["cpu"][-1][1] / raw["cpu"][-1][0],
        "JS heap at the end over halfway": raw["heap_mb"][-1][1] / raw["heap_mb"][0][1],
        "saved notebook with widget state (MB)": raw["notebook_mb"],
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--seconds", type=float, default=120.0)
    ask.add_argument("--out", type=Path)
    ask.add_argument("--shot", type=Path)
    ask.add_argument("--size", default="1280x720")
    ask.add_argument("--real", action="store_true", help="four real ranks on an emulated link instead of made-up rows")
    ask.add_argument("--ranks", type=int, default=8, help="of made-up rows")
    said = ask.parse_args()
    width, height = map(int, said.size.split("x"))
    found = measure(said.seconds, said.shot, (width, height), REAL if said.real else CELL.format(ranks=said.ranks))
    for name, value in found["results"].items():
        sign, limit = BUDGETS[name]
        good = value <= limit if sign == "<=" else value >= limit
        print(f"{'ok  ' if good else 'OVER'} {name}: {value:.3g} ({sign} {limit:g})")
    print(*found["raw"]["trouble"], sep="\n")
    if said.out:
        said.out.write_text(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()
