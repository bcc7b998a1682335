"""A run as one plain page that opens from disk without a network: the dashboard's charts, cards and settings.

The page is the live board's own page half (chart.js, panel.js, board.js), fed from inside the file instead of from
a kernel; a live view and a recorded view cannot differ. Steps to hold still are chosen here: nobody computes later.
"""

from __future__ import annotations

import base64
import gzip
import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from widgets.board import PAGE_CSS, PAGE_JS, plotly_js
from widgets.feed import Feed, Message
from workbench.analysis import last_steps

WINDOWS = 40  # stretches of steps that can be held still

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
{play}
</script></body></html>
"""

PLAY = """
// Stands in for the kernel: answers the page from what the file holds.
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const unzipped = async (text) =>
  (await new Response(new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("gzip"))).json());
const kept = await unzipped(document.getElementById("run").textContent);
const hearers = new Set();
let number = 0;
const tell = ([content, buffer]) =>
  [...hearers].forEach((hear) => hear({ ...content, number: ++number }, buffer === null ? [] : [bytes(buffer)]));
const answers = {
  hello: () => tell(kept.open), // any answer tells that somebody is there
  here: () => tell([{ kind: "alive" }, null]),
  plotly: () => tell([{ kind: "plotly" }, document.getElementById("plotly").textContent]),
  table: ({ view, open }) => open && tell([{ kind: "tables", tables: { [view]: kept.tables[view] } }, null]),
  ask: ({ request: { at } }) => {
    if (at === undefined) return;
    const near = kept.windows.reduce((a, b) => (Math.abs(b.first - at) < Math.abs(a.first - at) ? b : a));
    tell(near.message);
  },
};
const model = {
  on: (_, hear) => hearers.add(hear),
  off: (_, hear) => hearers.delete(hear),
  send: (message) => queueMicrotask(() => answers[message.kind]?.(message)),
};
const shown = board();
shown.initialize({ model });
shown.render({ el: document.getElementById("board") });
"""


def write_report(run: Any, path: str | Path) -> Path:
    """Writes the run as a self-contained page (about 2 MB, plotly.js among it) and returns where."""
    feed, path = Feed(run), Path(path)
    content, buffers = feed.everything()
    for spec in content["specs"]:
        spec["tools"] = spec["tools"] and "at"  # the reader chooses among the windows below
    kept: dict[str, Any] = {"open": _plain((content, buffers))}
    kept["tables"] = {view.name: table for view in feed.views if (table := feed.table(view.name))}
    kept["windows"] = [{"first": at, "message": _plain(message)} for at, message in _windows(feed)]
    state = f"{run.state}, {run.started}"
    page = PAGE.format(
        title=escape(f"Run {run.name}"),
        about=escape(f"{state}; {len(run.timeline.spans):,} spans of {run.settings.get('ranks', '?')} ranks"),
        css=PAGE_CSS,
        settings=escape(json.dumps(run.settings, indent=2, default=str)),
        environment=escape(json.dumps(run.environment, indent=2, default=str)),
        run=base64.b64encode(gzip.compress(json.dumps(kept, default=str).encode(), mtime=0)).decode(),
        plotly=base64.b64encode(plotly_js()).decode(),
        js=PAGE_JS.replace("export default", "const board ="),
        play=PLAY,
    )
    path.write_text(page, encoding="utf-8")
    return path


def _windows(feed: Feed) -> list[tuple[int, Message]]:
    """Some stretches of steps that the reader may hold still: evenly spread, and around each change."""
    view, (first, stop) = feed.view("timeline"), last_steps(feed.run.timeline)
    if view is None or stop <= first:
        return []
    even = np.linspace(first, stop - 1, WINDOWS).astype(int).tolist()
    near = [max(first, change.at_step + d) for change in feed.run.changes[:WINDOWS] for d in (-2, -1, 0, 2)]
    out = []
    for at in sorted(set(even) | set(near)):
        view.ask({"at": at})
        if patch := view.update(feed.run):
            out.append((at, feed.message({view.name: patch})))
    return out


def _plain(message: Message) -> tuple[dict[str, Any], str | None]:
    content, buffers = message
    return content, base64.b64encode(buffers[0]).decode() if buffers else None
