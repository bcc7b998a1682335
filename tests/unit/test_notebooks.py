"""Tests the lessons as files: small, with fresh outputs, and with a lesson's structure."""

from __future__ import annotations

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.course import DATA, HEAD, code_of, head
from tests.static_outputs import COVER, KEY, MAX_BYTES, read_texts, strip
from widgets.hints import find_hints

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(p.name for p in FOLDER.glob("*.ipynb"))


def book(name: str) -> Any:
    return nbformat.read(FOLDER / name, as_version=4)


def code(name: str) -> list[str]:
    return [cell.source for cell in book(name).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_is_small_without_its_outputs(name: str) -> None:
    raw = strip(json.loads((FOLDER / name).read_text("utf8")))
    assert raw["metadata"]["kernelspec"]["name"] == "python3"
    assert len(json.dumps(raw, indent=1, ensure_ascii=False).encode()) < 20_000
    nbformat.validate(book(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_the_outputs_of_its_present_code(name: str) -> None:
    raw = json.loads((FOLDER / name).read_text("utf8"))
    cells = [cell for cell in raw["cells"] if cell["cell_type"] == "code"]
    full = [cell for cell in cells if cell["outputs"]]
    assert all(cell["metadata"]["jupyter"]["outputs_hidden"] for cell in full), "a reader would see answers"
    assert all(cell["outputs"][0] == COVER for cell in full), "JupyterLab shows the first line of a hidden cell"
    assert raw["metadata"][KEY] == {"code": code_of(name), "cells": len(full)}, f"make outputs LESSONS={name[:2]}"
    assert all(cell["outputs"] for cell in cells if shows_result("".join(cell["source"]))), "a result is missing"


def shows_result(source: str) -> bool:
    """Whether a cell surely has a result: it ends with a name or a dictionary, or answers a question."""
    last = ast.parse(source).body[-1]
    ends = isinstance(last, ast.Expr) and isinstance(last.value, ast.Name | ast.Dict)
    return ends or bool(re.match(r"\w+\.(?:after|against)\(", source.splitlines()[-1]))


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_small_described_and_of_no_machine(name: str) -> None:
    raw = json.loads((FOLDER / name).read_text("utf8"))
    for output in (one for cell in raw["cells"] for one in cell.get("outputs", ())):
        data = output.get("data", {})
        assert len(json.dumps({k: v for k, v in data.items() if k != "image/png"})) < MAX_BYTES / 10
        assert len(base64.b64decode(data.get("image/png", ""))) < MAX_BYTES
        assert "image/png" not in data or len("".join(data["text/plain"])) > 10, "a picture needs a description"
    said = "\n".join(read_texts(raw))
    assert not re.findall(r"<style|style=|<script|/home/|/tmp/|/root/|\d\d:\d\d:\d\d|\b20\d\d-\d\d-\d\d", said)
    assert "Predict first" not in said, "the results of a lesson are shown"


WRITES = {"24_your_own.ipynb": 32}  # a strategy is a class, which cannot be split into cells


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_lesson_is_short_and_parses(name: str) -> None:
    for source in code(name):
        ast.parse(source)
        assert len(source.splitlines()) <= WRITES.get(name, 12), source


WIDE = {"22_who_decides_when.ipynb": 104}  # one line of a check of twelve lines


@pytest.mark.parametrize("name", NAMES)
def test_no_line_of_code_is_cut_off_on_a_projector(name: str) -> None:
    """At 1024 x 768 JupyterLab shows about 104 columns of a cell."""
    for line in "\n".join(code(name)).splitlines():
        assert len(line) <= WIDE.get(name, 100), line


UNITS = r"\d[\d.,]*\s*(?:ms|s|MB|kB|Mbit/s|%|times|steps|ranks|messages)(?!\w)"
SETS = r"[Ss]et (?:\*\*\w+\*\*|it)(?: back)? to \d+"  # settings that the reader changes: tests/browser shows them


@pytest.mark.parametrize("name", NAMES)
def test_no_number_with_a_unit_is_typed_into_a_lesson(name: str) -> None:
    """Numbers come from the recipe or from the run: in an f-string, or in a cell's output."""
    prose = [HEAD.sub("", cell.source) for cell in book(name).cells if cell.cell_type == "markdown"]
    said = [token for source in code(name) for token in re.findall(r"#[^\n]*|[\"'][^\"'\n]*[\"']", source)]
    for text in (*prose, *(re.sub(r"\{[^{}]*\}", "", token) for token in said)):  # expressions in braces are computed
        assert not re.findall(UNITS, re.sub(SETS, "", text)), text


@pytest.mark.parametrize("name", ["02_reading_a_timeline.ipynb", "11_one_strategy_two_clocks.ipynb"])
def test_the_answer_is_shown_only_after_a_guess(name: str) -> None:
    sources = code(name)
    asked = next(i for i, s in enumerate(sources) if "guess = Prediction(" in s)
    answered = next(i for i, s in enumerate(sources) if "guess.against(" in s)
    for source in sources[asked + 1 : answered]:
        last = source.splitlines()[-1]
        assert last == "lab" or last.startswith("guess.after("), last
    assert "priced(" in sources[asked] and "lab)" in sources[asked]


@pytest.mark.parametrize(
    ("name", "guess", "answer"),
    [
        ("02_reading_a_timeline.ipynb", "faster", "where_time_goes(run, last=8)"),
        ("11_one_strategy_two_clocks.ipynb", "best", '"bucket_mb": size'),
    ],
)
def test_the_question_of_a_knob_is_asked_before_it_is_set(name: str, guess: str, answer: str) -> None:
    sources = code(name)
    at = next(i for i, s in enumerate(sources) if answer in s)
    assert sources[at].splitlines()[-1].startswith(f"{guess}.after(")
    assert f"{guess} = Prediction(" in sources[at - 1] and "during=True" in sources[at - 1]
    assert f"{guess}.against(" in sources[at + 1]


def test_three_lines_lead_from_nothing_to_the_dashboard() -> None:
    assert code("01_first_run.ipynb")[0].splitlines() == ["from workbench import Lab", "lab = Lab(ranks=4)", "lab"]


def test_a_lesson_asks_before_it_shows() -> None:
    sources = code("02_reading_a_timeline.ipynb")
    order = [
        next(i for i, s in enumerate(sources) if word in s)
        for word in ("Prediction(", "lab.run", "guess.against", "lab.set", "riddle.check")
    ]
    assert order == sorted(order)


SHAPE = ("Question", "Run", "Surprise?", "A knob to set", "Exercise", "What this does not show")
TEACHER = ("What students believe", "The prediction", "Ask next", "How long",
           "On the projector", "What was measured here")  # fmt: skip


def headings(text: str) -> list[str]:
    return re.findall(r"^## (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_its_shape_and_ends_with_the_worksheet(name: str) -> None:
    prose = "\n".join(cell.source for cell in book(name).cells if cell.cell_type == "markdown")
    found = [head.partition(":")[0] for head in headings(prose)]
    asked = SHAPE if name > "02" else SHAPE[-2:]  # the first lesson is a tour of the dashboard
    assert [head for head in found if head in asked] == list(asked)
    title = re.findall(r"^# (.+)$", prose, re.MULTILINE)
    assert len(title) == 1 and code(name)[-1] == f'worksheet("{name[:2]} {title[0]}")'


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_its_page_for_the_teacher(name: str) -> None:
    page = (FOLDER.parent / "docs" / "learn" / "teach" / f"{name[:2]}.md").read_text("utf8")
    assert headings(page) == list(TEACHER)
    assert f"(../../../notebooks/{name})" in page and len(page.split()) < 1_200


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_has_hints_and_says_how_to_get_them(name: str) -> None:
    prose = "\n".join(cell.source for cell in book(name).cells if cell.cell_type == "markdown")
    assert re.search(r"`\w+\.hint\(\)`", prose)


@pytest.mark.parametrize("name", [name for name in NAMES if name > "03"])
def test_hints_are_hidden_until_requested(name: str) -> None:
    """The notebook asks for hints by its number."""
    told = find_hints(name[:2])
    assert len(told) > 1 and all(len(hint) > 20 and hint[-1] in ".?" for hint in told)
    text = (FOLDER / name).read_text("utf8")
    assert f'hints=\\"{name[:2]}\\"' in text and not any(json.dumps(hint)[1:-1] in text for hint in told)


def test_a_lesson_is_measured_again_after_a_change_of_code_but_not_of_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.course.NOTEBOOKS", tmp_path)

    def hashed(*sources: str) -> str:
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "one.ipynb")
        return code_of("one.ipynb")

    usual = hashed('ask(f"How long is {n}?", every=8)', 'rows.query("a == 1")')
    assert hashed('ask(f"How many seconds does {n} take?", every=8)', 'rows.query("a == 1")') == usual
    for other in ("every=9", "each=8", 'every="8"'):
        assert hashed(f'ask(f"How long is {{n}}?", {other})', 'rows.query("a == 1")') != usual
    assert hashed('ask(f"How long is {m}?", every=8)', 'rows.query("a == 1")') != usual
    assert hashed('ask(f"How long is {n}?", every=8)', 'rows.query("a == 2")') != usual


@pytest.mark.parametrize("name", NAMES)
def test_a_lessons_head_has_the_measured_duration_of_its_present_code(name: str) -> None:
    found = json.loads(DATA.read_text())[name]
    assert found["code"] == code_of(name), "python -m tests.course measures it again"
    assert head(found) in book(name).cells[0].source
