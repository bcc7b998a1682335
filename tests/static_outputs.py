"""Turns the outputs of an executed lesson into text, tables and pictures that need no kernel, and stores them.

JupyterLab hides stored outputs until a reader runs their cell, so nobody sees an answer before the question.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import re
import socket
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from typing import Any

from PIL import Image

from tests.chromium import find
from widgets.charts.board import plotly_js

KEY = "training-workbench"  # in the metadata of a notebook
MAX_BYTES = 300_000  # of an output
WIDE, COLOURS = 1000, 96  # of a picture: px, and colours of its palette
WIDGET, PLOTLY = "application/vnd.jupyter.widget-view+json", "application/vnd.plotly.v1+json"
# JupyterLab shows the first line of a hidden cell's first output, so the first output is empty.
COVER: dict[str, Any] = {"output_type": "display_data", "data": {}, "metadata": {}}
FIRST = """def show_results():
    import re
    from widgets.charts import picture
    from widgets.teach.prediction import Prediction
    from widgets.teach.said import ShownText
    from widgets.teach.worksheet import store_note
    make_title = picture._make_title
    picture._make_title = lambda run: re.sub(r"^Run 20\\d{6}-\\d{6}-", "Run ", make_title(run))
    Prediction.after = lambda self, shown: shown

    def against(self, truth):
        store_note("prediction", self.question, answer=truth)
        return ShownText(f"The record says: {truth}.")

    Prediction.against = against

show_results()"""  # no guess is needed, and a picture has no date
LAST = """def end_run():
    import time
    lab = globals().get("lab")
    if lab is not None and lab.live:
        lab.stop()
        lab.run_now.wait(60)
        time.sleep(5)

end_run()"""  # a run that an exercise left alive has no picture yet
DATED = re.compile(r"\b20\d{6}-\d{6}-")  # at the beginning of a run's name
NO_PICTURE = "Here JupyterLab shows controls and charts of this cell."


def strip(raw: dict[str, Any]) -> dict[str, Any]:
    """Removes the stored outputs from a notebook's JSON, and all that belongs to them. Returns it."""
    raw["metadata"].pop(KEY, None)
    for cell in raw["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            hidden = cell["metadata"].get("jupyter", {})
            hidden.pop("outputs_hidden", None)
            if not hidden:
                cell["metadata"].pop("jupyter", None)
    return raw


def store(path: Path, book: Any, code: str, places: dict[str, str]) -> int:
    """Writes the outputs of `book`, which was executed, into the notebook `path`. Returns their number.

    code:   the hash of the lesson's code
    places: paths of this machine -> what to write instead
    """
    raw = strip(json.loads(path.read_text("utf8")))
    executed = [cell for cell in book.cells if cell.cell_type == "code"]
    cells = [cell for cell in raw["cells"] if cell["cell_type"] == "code"]
    state = book.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    with painting() as paint:
        for cell, done in zip(cells, executed, strict=True):
            if "".join(cell["source"]) != done.source:
                raise ValueError(f"{path.name}: the executed notebook has other cells")
            shown = drop_controls(done.outputs, state)
            cell["outputs"] = [made for one in shown if (made := convert(one, state, paint))]
            if cell["outputs"]:
                cell["outputs"].insert(0, COVER)
                cell["metadata"]["jupyter"] = {**cell["metadata"].get("jupyter", {}), "outputs_hidden": True}
    count = sum(bool(cell["outputs"]) for cell in cells)
    raw["metadata"][KEY] = {"code": code, "cells": count}
    text = json.dumps(raw, indent=1, ensure_ascii=False) + "\n"
    for place, instead in places.items():
        text = text.replace(place, instead)
    text = DATED.sub("", text)
    said = "".join(read_texts(json.loads(text)))
    if found := [word for word in (socket.gethostname(), str(Path.home())) if re.search(rf"(?<!\w){word}(?!\w)", said)]:
        raise ValueError(f"{path.name}: outputs have {found[0]!r}, which is of this machine")
    path.write_text(text, "utf8")
    return count


def read_texts(raw: dict[str, Any]) -> Iterator[str]:
    """Yields the texts of a notebook's stored outputs, without pictures."""
    for cell in raw["cells"]:
        for output in cell.get("outputs", ()):
            yield "".join(output.get("text", ()))
            yield from ("".join(value) for kind, value in output.get("data", {}).items() if kind != "image/png")


def drop_controls(outputs: list[Any], state: dict[str, Any]) -> list[Any]:
    """Returns outputs without progress bars and without dashboards next to their run's picture."""
    widgets = [one for one in outputs if WIDGET in one.get("data", {})]
    bars = [one for one in widgets if "FloatProgressModel" in list_models(one.data[WIDGET]["model_id"], state)]
    dashboards = widgets if any("image/png" in one.get("data", {}) for one in outputs) else []
    return [one for one in outputs if one not in bars and one not in dashboards]


def list_models(name: str, state: dict[str, Any]) -> list[str]:
    """Returns the kinds of a widget and of its children."""
    model = state.get(name, {})
    inner = [
        list_models(child.removeprefix("IPY_MODEL_"), state) for child in model.get("state", {}).get("children", ())
    ]
    return [model.get("model_name", ""), *(kind for every in inner for kind in every)]


def convert(output: Any, state: dict[str, Any], paint: Any) -> dict[str, Any] | None:
    """Returns an output as text, a table or a picture; None if it has nothing to show."""
    if output.output_type == "stream":
        text = re.sub(r"\x1b\[[\d;]*m", "", output.text)
        return {"output_type": "stream", "name": "stdout", "text": lines(text)} if output.name == "stdout" else None
    if output.output_type == "error":
        raise ValueError(f"a cell failed: {output.ename}: {output.evalue}")
    data = output.data
    if PLOTLY in data:
        figure = data[PLOTLY]
        return display({"image/png": paint(figure), "text/plain": describe(figure)})
    if "image/png" in data:
        return display({"image/png": shrink(base64.b64decode(data["image/png"])), "text/plain": data["text/plain"]})
    if WIDGET in data:
        html = "".join(show_widget(data[WIDGET]["model_id"], state))
        return display({"text/html": html, "text/plain": plain(html)} if html else {"text/plain": NO_PICTURE})
    kept = {kind: data[kind] for kind in ("text/html", "text/markdown", "text/latex", "text/plain") if kind in data}
    if "text/html" in kept:
        kept["text/html"] = bare(kept["text/html"])
    sheet = output.metadata.get(KEY)  # of a worksheet: hand-outs read it, and `handed_in` must not
    return display(kept, {KEY: {**sheet, "stored": True}} if sheet else {}) if kept else None


def display(data: dict[str, str], about: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a display output. A picture is one line, as nbformat writes it."""
    data = {kind: value if kind == "image/png" else lines(value) for kind, value in data.items()}  # type: ignore[misc]
    return {"output_type": "display_data", "data": data, "metadata": about or {}}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def bare(html: str) -> str:
    """Returns HTML without style sheets, scripts and attributes of looks, which GitHub does not show."""
    html = re.sub(r"(?s)<(style|script)\b.*?</\1>", "", html)
    return re.sub(r'\s(?:style|class|border|id|role|dir)="[^"]*"', "", html).strip()


def plain(html: str) -> str:
    """Returns the words of HTML, a block per line."""
    text = re.sub(r"</(?:p|li|tr|div|table|b)>|<br>", "\n", html)
    return "\n".join(line.strip() for line in unescape(re.sub(r"<[^>]+>", " ", text)).splitlines() if line.strip())


def show_widget(name: str, state: dict[str, Any]) -> Iterator[str]:
    """Yields what a widget and its children show, as HTML. Charts and controls yield nothing."""
    model = state.get(name, {})
    kind, has = model.get("model_name", ""), model.get("state", {})
    if kind in ("HTMLModel", "LabelModel") and (said := bare(has.get("value", ""))):
        yield f"<p>{said}</p>" if not re.search(r"<(?:p|div|table|h\d)\b", said) else said
    if kind == "RadioButtonsModel":
        yield "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in has["_options_labels"]) + "</ul>"
    for child in has.get("children", ()):
        yield from show_widget(child.removeprefix("IPY_MODEL_"), state)


def describe(figure: dict[str, Any]) -> str:
    """Returns a figure's description for readers who cannot see it: its own, or its title."""
    layout = figure["layout"]
    title = re.sub(r"<[^>]+>", "", (layout.get("title") or {}).get("text", ""))
    return str((layout.get("meta") or {}).get("alt") or f"Chart: {title}")


def shrink(png: bytes) -> str:
    """Returns a picture with a palette of few colours, in base64. Raises ValueError if it is too large."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    file = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    if file.tell() > MAX_BYTES:
        raise ValueError(f"a picture has {file.tell()} bytes, and may have {MAX_BYTES}")
    return base64.b64encode(file.getvalue()).decode()


@contextlib.contextmanager
def painting() -> Iterator[Any]:
    """Yields a function that paints a plotly figure in Chromium and returns its picture in base64."""
    pages: list[Any] = []
    with contextlib.ExitStack() as stack:

        def paint(figure: dict[str, Any]) -> str:
            if not pages:
                pages.append(open_page(stack))
            page = pages[0]
            figure["layout"].setdefault("height", 450)
            page.evaluate(PAINT, {"data": figure["data"], "layout": {**figure["layout"], "width": WIDE}})
            return shrink(page.locator("#figure").screenshot(type="png"))

        yield paint


PAINT = """async (figure) => {
  const { width, height } = figure.layout;
  document.body.innerHTML = `<div id="figure" style="width: ${width}px; height: ${height}px; background: white"></div>`;
  await Plotly.newPlot("figure", figure.data, figure.layout, {staticPlot: true});
}"""


def open_page(stack: contextlib.ExitStack) -> Any:
    """Opens a page with plotly.js. Raises RuntimeError without a Chromium."""
    from playwright.sync_api import sync_playwright

    if (chromium := find()) is None:
        raise RuntimeError("no Chromium, which paints the figures; python tests/chromium.py installs one")
    browser = stack.enter_context(sync_playwright()).chromium.launch(executable_path=chromium)
    page = browser.new_page(viewport={"width": WIDE, "height": 800})
    stack.callback(browser.close)
    page.add_script_tag(content=gzip.decompress(plotly_js()).decode())
    return page
