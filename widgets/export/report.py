"""Writes a run as one page that works without a network: charts, cards and settings.

The page uses the live board's JavaScript (replay.js) with data from the file. It computes nothing, so this module
chooses the windows of steps to select. The site's lessons also use `pack_run` and `REPLAY_JS`.
"""

from __future__ import annotations

import base64
import gzip
import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from widgets.charts.board import PAGE_CSS, PAGE_JS, plotly_js
from widgets.charts.feed import Feed, Message
from widgets.static import read_static
from workbench.analysis import last_steps

WINDOWS = 40  # windows of steps to select
REPLAY_JS = PAGE_JS.replace("export default", "const board =") + read_static("replay.js")

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; padding: 12px 20px 40px; max-width: 1500px; font: 15px/1.5 system-ui, sans-serif;
  background: var(--jp-layout-color0); color: var(--jp-ui-font-color0);
  --jp-layout-color0: #fff; --jp-layout-color1: #fff; --jp-ui-font-color0: #1a1a1a; --jp-ui-font-color1: #1a1a1a;
  --jp-ui-font-color2: #565656; --jp-border-color2: #ccc; }}
@media (prefers-color-scheme: dark) {{ body {{ --jp-layout-color0: #111; --jp-layout-color1: #1d1d1d;
  --jp-ui-font-color0: #f2f2f2; --jp-ui-font-color1: #f2f2f2; --jp-ui-font-color2: #bdbdbd;
  --jp-border-color2: #444; }} }}
h1 {{ font-size: 20px; margin: 0 0 2px; }} .about {{ margin: 0 0 12px; color: var(--jp-ui-font-color2); }}
pre {{ overflow: auto; font-size: 14px; }}
{css}</style></head><body>
<h1>{title}</h1><p class="about">{about}</p>
<div id="board"></div>
<details><summary>Settings</summary><pre>{settings}</pre></details>
<details><summary>Environment</summary><pre>{environment}</pre></details>
<script type="application/json" id="run">{run}</script>
<script type="text/plain" id="plotly">{plotly}</script>
<script type="module">
{js}
const text = (id) => document.getElementById(id).textContent;
replay(document.getElementById("board"), text("run"), () => bytes(text("plotly")));
</script></body></html>
"""


def write_report(run: Any, path: str | Path) -> Path:
    """Writes the run as a self-contained page (about 2 MB with plotly.js) and returns its path."""
    path = Path(path)
    state = f"{run.state}, {run.started}"
    page = PAGE.format(
        title=escape(f"Run {run.name}"),
        about=escape(f"{state}; {len(run.timeline.spans):,} spans of {run.settings.get('ranks', '?')} ranks"),
        css=PAGE_CSS,
        settings=escape(json.dumps(run.settings, indent=2, default=str)),
        environment=escape(json.dumps(run.environment, indent=2, default=str)),
        run=pack_run(run),
        plotly=base64.b64encode(plotly_js()).decode(),
        js=REPLAY_JS,
    )
    path.write_text(page, encoding="utf-8")
    return path


def pack_run(run: Any, windows: int = WINDOWS, steps: int | None = None) -> str:
    """Returns the run's charts, tables and windows of steps as base64 text.

    windows: number of windows, evenly spread (at most one per step)
    steps:   steps per window; None: chosen by the view
    """
    feed = Feed(run)
    content, buffers = feed.make_opening()
    for spec in content["specs"]:
        spec["tools"] = spec["tools"] and "at"  # the reader selects a window
        spec["quiet"] |= bool(len(run.timeline.spans))
    held: dict[str, Any] = {"open": _to_text((content, buffers))}
    held["tables"] = {view.name: table for view in feed.views if (table := feed.make_table(view.name))}
    held["windows"] = _choose_windows(feed, windows, steps)
    return base64.b64encode(gzip.compress(json.dumps(held, default=str).encode(), mtime=0)).decode()


def _choose_windows(feed: Feed, windows: int, steps: int | None) -> list[dict[str, Any]]:
    """Returns windows of steps to select: evenly spread and around each change."""
    view, (first, stop) = feed.find_view("timeline"), last_steps(feed.run.timeline)
    if view is None or stop <= first:
        return []
    even = np.linspace(first, stop - 1, windows).astype(int).tolist()
    near = [max(first, change.at_step + d) for change in feed.run.changes[:WINDOWS] for d in (-2, -1, 0, 2)]
    out = []
    for at in sorted(set(even) | set(near)):
        view.ask({"at": at, "steps": steps})
        if patch := view.update(feed.run):
            message = _to_text(feed.pack_message({view.name: patch}))
            out.append({"first": at, "message": message, "tables": {view.name: feed.make_table(view.name)}})
    return out


def _to_text(message: Message) -> tuple[dict[str, Any], str | None]:
    content, buffers = message
    return content, base64.b64encode(buffers[0]).decode() if buffers else None
