"""Makes a lesson's slides: one HTML page that needs no network, by nbconvert's exporter of slides.

Each `## ` heading begins a slide, and so does a text after a question or an output. An output that answers a question
appears with the next key press, so the class can answer first. Code is hidden until someone presses C. The page has its
own script, because nbconvert loads reveal.js, MathJax and the scripts of widgets from the network.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Sequence
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from widgets.charts.board import plotly_js
from widgets.course.formulas import put_formulas, take_formulas
from widgets.course.parts import read_part
from widgets.course.questions import UNKNOWN, Question, matches

PLOTLY = "application/vnd.plotly.v1+json"
SHOWN = ("text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/plain")
WIDGET = "application/vnd.jupyter.widget-view+json"
REVEALS = re.compile(r"\b\w+\.(after|against)\(")  # such a cell answers a question
OWN_WORK = re.compile(r"\.(check|hint|give_up|hand_in)\(|\bworksheet\(")  # each student has an own result

TEMPLATE = """{%- extends 'index.html.j2' -%}
{%- block header -%}
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ resources.slides.title | e }}</title>
{% for css in resources.inlining.css %}<style>{{ css }}</style>{% endfor %}
<style>{{ resources.slides.css }}</style></head>
{%- endblock header -%}
{%- block body_header -%}<body><main class="slides">{%- endblock body_header -%}
{%- block output_area_prompt -%}{%- endblock -%}
{%- block empty_in_prompt -%}{%- endblock -%}
{%- block in_prompt -%}{%- endblock -%}
{%- block body_footer -%}</main>
<nav><button id="back" title="Previous (left arrow)">&lsaquo;</button><span id="place"></span>
<button id="next" title="Next (right arrow)">&rsaquo;</button>
<button id="code" title="Show or hide code (C)">Code</button></nav>{%- endblock body_footer -%}
{%- block footer -%}{{ resources.slides.scripts }}</body></html>{%- endblock footer -%}
"""


def make_slides(book: NotebookNode, title: str, questions: Sequence[Question]) -> str:
    """Returns the slides of a lesson as a page. Raises ImportError without nbconvert.

    book: the lesson, with its stored outputs if it has any
    """
    from nbconvert.exporters import SlidesExporter
    from traitlets.config import Config

    formulas: list[str] = []
    shown = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}}, cells=_make_cells(book, questions))
    for cell in shown.cells:
        if cell.cell_type == "markdown":
            cell.source = take_formulas(cell.source, formulas)
    config = Config(NbConvertBase={"display_data_priority": list(SHOWN)})
    exporter = SlidesExporter(config=config, raw_template=TEMPLATE, exclude_anchor_links=True)
    about = {"title": title, "css": read_part("slides.css"), "scripts": _make_scripts(shown)}
    page, _ = exporter.from_notebook_node(shown, resources={"slides": about, "metadata": {"name": title}})
    return put_formulas(str(page), formulas)


def _make_cells(book: NotebookNode, questions: Sequence[Question]) -> list[NotebookNode]:
    """Returns the cells of the slides with nbconvert's marks for slides, parts of slides and steps."""
    asked = _find_stored_questions(book)
    cells: list[NotebookNode] = []
    is_full = False  # whether the slide has a question or an output, so that the next text may answer it
    for number, cell in enumerate(book.cells):
        if cell.cell_type == "markdown":
            for part in split_at_headings(cell.source):
                kind = "slide" if part.startswith("## ") or not cells else "subslide" if is_full else "-"
                cells.append(_mark(new_markdown_cell(make_links_plain(part)), kind))
                is_full = False
        elif cell.cell_type == "code":
            mine = [question for question in questions if question.cell == number and question.choices]
            whole = nbformat.from_dict(cell)
            whole.outputs = [] if mine or OWN_WORK.search(cell.source) else _choose_outputs(cell.outputs)
            step = bool(whole.outputs and REVEALS.search(cell.source))
            cells.append(_mark(whole, "fragment" if step else "-"))
            cells += [_mark(new_markdown_cell(_show_question(question, asked)), "-") for question in mine]
            is_full |= bool(whole.outputs or mine)
    return cells


def _mark(cell: NotebookNode, kind: str) -> NotebookNode:
    cell.metadata = nbformat.from_dict({"slideshow": {"slide_type": kind}})
    return cell


def split_at_headings(text: str) -> list[str]:
    r"""Splits Markdown before each `## ` heading outside of a code block.

    >>> split_at_headings("a\n\n## Run\nb")
    ['a\n', '## Run\nb']
    """
    parts: list[list[str]] = [[]]
    is_code = False
    for line in text.split("\n"):
        is_code ^= line.startswith("```")
        if line.startswith("## ") and not is_code and any(parts[-1]):
            parts.append([])
        parts[-1].append(line)
    return ["\n".join(lines) for lines in parts]


def make_links_plain(text: str, kept: Sequence[str] = ()) -> str:
    """Replaces links to files by their text, except to these files.

    >>> make_links_plain("[a](05_buckets.ipynb), [b](https://b.org), [c](../CONTRIBUTING.md)", ["05_buckets.ipynb"])
    '[a](05_buckets.ipynb), [b](https://b.org), c'
    """

    def plain(match: re.Match[str]) -> str:
        goes = re.match(r"https?:|mailto:|attachment:|#", match[2]) or match[2].partition("#")[0] in kept
        return match[0] if goes else match[1]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", plain, text)


def _find_stored_questions(book: NotebookNode) -> list[str]:
    """Returns the questions in the outputs of a notebook's worksheet, with the values of that run."""
    from widgets.teach.worksheet import KEY

    held = [output.get("metadata", {}).get(KEY, {}) for cell in book.cells for output in cell.get("outputs", ())]
    return [item["question"] for sheet in held for item in sheet.get("items", ())]


def _show_question(question: Question, asked: Sequence[str]) -> str:
    """Returns a prediction as Markdown: the question with its choices, and no answer."""
    whole = next((text for text in asked if matches(question.text, text)), question.text)
    choices = [choice for choice in question.choices if choice != UNKNOWN]
    return "\n".join([f"**{html.escape(whole)}**", "", *(f"- {html.escape(choice)}" for choice in choices)])


def _choose_outputs(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Returns the outputs that a page can show without a kernel or a network."""
    chosen = []
    for output in outputs:
        if output.output_type in ("stream", "error"):
            chosen.append(output)
            continue
        data = {kind: value for kind, value in output.get("data", {}).items() if kind in SHOWN}
        if "<script" in "".join(data.get("text/html", "")):
            del data["text/html"]
        if PLOTLY in output.data and not data.keys() - {"text/plain"}:
            data = {"text/html": _place_figure(output.data[PLOTLY])}
        if WIDGET in output.data:  # its text describes the moment at which the cell ran
            data = {kind: value for kind, value in data.items() if kind.startswith("image/")}
        if data:
            chosen.append(nbformat.from_dict({**output, "data": data}))
    return chosen


def _place_figure(figure: dict[str, Any]) -> str:
    """Returns the place where the page's script draws a figure of plotly."""
    about = (figure.get("layout", {}).get("meta") or {}).get("alt", "a figure")  # as the figures of lessons say
    held = html.escape(json.dumps({"data": figure.get("data", []), "layout": figure.get("layout", {})}))
    return f'<div class="figure" role="img" aria-label="{html.escape(about)}" data-figure="{held}"></div>'


def _make_scripts(book: NotebookNode) -> str:
    scripts = f"<script>{read_part('slides.js')}</script>"
    if "data-figure=" not in nbformat.writes(book):
        return scripts
    return f'<script type="text/plain" id="plotly">{base64.b64encode(plotly_js()).decode()}</script>{scripts}'
