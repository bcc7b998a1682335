"""Tests parts of the page without a browser, with the node that playwright ships."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

WIDGETS = Path(__file__).parents[2] / "widgets" / "static"
WALK = """
const element = () => ({}), heard = {};
const body = { dataset: {}, setAttribute() {}, addEventListener(kind, call) { heard[kind] = call; } };
const tip = { hidden: false, setAttribute() {} };
const panel = Object.create(Panel.prototype);
body.after = () => {};
const holding = { facts: {}, spec: {} }, picture = { div: {}, rows: () => [] };
Object.assign(panel, { body, tip, holding, picture, hub: { looks: {} } });
panel.box = { y: 0, x0: 1, x1: 2 }; // what was walked to before; the window has gone on since
panel.walk(tip);
heard.keydown({ key: "ArrowRight", preventDefault() {} });
console.log(JSON.stringify({ box: panel.box, hidden: tip.hidden }));
"""
TAP = """
const heard = {}, addEventListener = (kind, call) => { heard[kind] = call; };
const body = { dataset: {}, after() {}, setAttribute() {}, addEventListener };
const element = () => ({}), tip = { setAttribute() {} }, box = { row: 3, lane: [0] };
const panel = Object.create(Panel.prototype);
let pin = null;
Object.defineProperty(panel, "pinned", { get: () => pin });
Object.assign(panel, { body, tip, holding: { facts: {}, spec: {} }, pin: (hit) => (pin = hit),
  picture: { boxAt: ({ clientX }) => (clientX ? box : null) } });
panel.walk(tip);
const tap = (t) => { // as Chromium and plotly tell it
  heard.click({ isTrusted: false, clientX: 0, clientY: 0, timeStamp: t });
  heard.click({ isTrusted: false, clientX: 155, clientY: 467, timeStamp: t + 30 });
  heard.click({ isTrusted: true, clientX: 155, clientY: 467, timeStamp: t + 31 });
  return pin;
};
console.log(JSON.stringify([tap(1000), tap(2000)]));
"""
PARTED = """
let now = 0, cut = false;
const said = [];
performance.now = () => now;
globalThis.setTimeout = () => 0;
const place = { el: { closest: () => cut }, cut: (why) => said.push(why) };
const pulse = new Pulse({ on() {} }, [place]);
pulse.ask(() => {});
for (now of [PATIENCE, PATIENCE + 1]) pulse.ask(() => {});
cut = true;
for (now of [PATIENCE + 2, PATIENCE + 3]) pulse.ask(() => {});
console.log(JSON.stringify(said));
"""


def page(part: str, code: str) -> Any:
    """Runs `code` after the page's file `part`; returns its output."""
    driver = pytest.importorskip("playwright._impl._driver")
    node = driver.compute_driver_executable()[0]
    script = f"const matchMedia = () => ({{}});\n{(WIDGETS / part).read_text('utf8')}\n{code}"
    done = subprocess.run([node, "-"], input=script, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_arrow_key_without_a_visible_box_hides_the_tip() -> None:
    assert page("panel.js", WALK) == {"box": None, "hidden": True}


def test_a_tap_pins_a_box_and_the_next_one_releases_it() -> None:
    pinned, then = page("panel.js", TAP)
    assert pinned == {"row": 3, "lane": [0]} and then is None


def test_a_silent_kernel_is_reported_as_gone_once_that_is_known() -> None:
    silent, gone = page("pulse.js", PARTED)
    assert "busy or gone" in silent and "is gone" in gone
