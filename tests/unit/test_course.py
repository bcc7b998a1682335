"""Tests the hand-out of lessons, its slides without a network, and the marks of worksheets. Starts no rank."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from typer.testing import CliRunner, Result

from tests import howto_pages
from widgets.course.formulas import write_mathml
from widgets.course.handout import Lesson, find_lessons, make_handout
from widgets.course.marking import mark_sheets
from widgets.course.questions import UNKNOWN, matches, read_questions
from widgets.course.slides import make_slides
from widgets.lesson import Fastest, Goal
from widgets.teach.worksheet import KEY
from workbench import Experiment, RunError
from workbench.cli import app

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ASKS = re.compile(r"\b(?:Prediction|Exercise|Goal|Fastest|Riddle|Challenge|Hidden)\(")


def say(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(result: Result) -> str:
    """Returns the sentence of an error."""
    assert result.exit_code == 2, result.output
    said = result.stderr.strip()
    assert said.startswith("workbench: ") and len(said.splitlines()) == 1
    return said


# -- questions


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_question_of_a_lesson_is_found_without_running_it(path: Path) -> None:
    lesson = Lesson(path)
    code = [cell.source for cell in lesson.book.cells if cell.cell_type == "code"]
    assert len(lesson.questions) == sum(len(ASKS.findall(source)) for source in code) >= 1
    assert all(question.text != UNKNOWN for question in lesson.questions)
    assert all((question.kind == "prediction") == bool(question.choices) for question in lesson.questions)


def test_a_question_keeps_what_is_fixed_and_marks_what_a_run_computes() -> None:
    cells = ["a, b = 'less', 'more'\nsteps = 20", None, "steps += run.steps\nsize = 2 * 3\nboth = {1: a, 2: b}",
             "g = Prediction(f'{steps} steps, ' + f'{size:.1f} MB, {run.ms:.0f} ms?', list(both.values()), lab)",
             "g.against(a)", "h = Prediction('same?', ['yes', f'{run.x} times'])", "h.against('no')"]  # fmt: skip
    first, second = read_questions(cells)
    assert (first.text, first.choices, first.answer) == (
        f"{UNKNOWN} steps, 6.0 MB, {UNKNOWN} ms?", ("less", "more"), "less")  # fmt: skip
    assert (second.choices, second.answer) == (("yes", f"{UNKNOWN} times"), None), "'no' is not a choice"
    assert first.asks("prediction", "27 steps, 6.0 MB, 3 ms?") and not first.asks("exercise", "27 steps, 6.0 MB, 3 ms?")
    assert not matches(first.text, "27 steps, 7.0 MB, 3 ms?")


def test_exercises_ask_what_their_classes_ask() -> None:
    goal, fast = "Goal(start, 'bytes_per_step', 0.3, loss=1.05)", "Fastest(start, [], 1.1, where=' here')"
    found = [question.text for question in read_questions([goal, fast, "Riddle(lab, e, 1, 'phase')"])]
    real = [Goal(Experiment(), "bytes_per_step", 0.3, loss=1.05), Fastest(Experiment(), [], 1.1, where=" here")]
    assert found[:2] == [exercise.question for exercise in real]
    assert matches(found[2], "one of 4 ranks is slow: which, and in what?")


# -- the hand-out


def test_a_handout_has_notebooks_without_outputs_answers_and_a_page_for_the_teacher(tmp_path: Path) -> None:
    done = say("course", "export", "6", "07", "--to", tmp_path / "h", "--no-slides")
    assert done.exit_code == 0, done.output
    files = sorted(path.relative_to(tmp_path / "h").as_posix() for path in (tmp_path / "h").rglob("*.*"))
    assert files == ["README.md", "answers.json", "notebooks/06_it_does_not_fit.ipynb", "notebooks/07_in_stages.ipynb"]
    text = (tmp_path / "h" / "README.md").read_text()
    assert "[07 In stages](notebooks/07_in_stages.ipynb) | none | 2 | 1 |" in text and "## Show the slides" not in text
    answers = json.loads((tmp_path / "h" / "answers.json").read_text())
    six, seven = answers["lessons"]
    assert [one["id"] for one in six["questions"]] == ["06.1", "06.2", "06.3"] and seven["lesson"] == "07 In stages"
    prediction, exercise = six["questions"][1:]
    assert "as many" in prediction["choices"] and prediction["answer"] is None and "record" in prediction["note"]
    assert exercise["question"] == FEWEST and "choices" not in exercise


def test_links_to_lessons_outside_of_the_handout_become_text() -> None:
    lessons = find_lessons(ROOT / "notebooks", ["06", "07"])
    six, seven = (nbformat.reads(make_handout(lessons, slides=False)[f"notebooks/{one.path.name}"], as_version=4)
                  for one in lessons)  # fmt: skip
    ends = [book.cells[-1].source for book in (six, seven)]
    assert "[In stages](07_in_stages.ipynb)" in ends[0]
    assert ".ipynb)" not in ends[1] and "Next: One layer on two ranks" in ends[1]
    assert not any("](../" in cell.source for cell in [*six.cells, *seven.cells])
    assert not any(cell.get("outputs") for cell in [*six.cells, *seven.cells])
    nbformat.validate(seven)


def test_a_handout_that_cannot_be_made_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()
    assert "already exists and is not empty" in refused(say("course", "export", "06", "--to", tmp_path / "full"))
    said = refused(say("course", "export", "99", "--to", tmp_path / "new"))
    assert "lesson 99: does not exist; the lessons are 01, 02" in said
    monkeypatch.setitem(sys.modules, "nbconvert.exporters", None)
    said = refused(say("course", "export", "06", "--to", tmp_path / "new"))
    assert "slides need nbconvert" in said and "--no-slides" in said
    assert not (tmp_path / "new").exists(), "nothing is left half done"


# -- slides


def lesson() -> Any:
    """Returns a small lesson with stored outputs."""
    table = new_output("execute_result", {"text/html": "<table><tr><td>12 ms</td></tr></table>", "text/plain": "12"})
    widget = new_output("execute_result", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"},
                                           "text/plain": "Prediction('long?', 'yes')"})  # fmt: skip
    figure = new_output(
        "display_data",
        {
            "application/vnd.plotly.v1+json": {
                "data": [{"type": "bar", "x": ["a"], "y": [1]}],
                "layout": {"meta": {"alt": "drawn"}},
            }
        },
    )
    script = new_output("display_data", {"text/html": "<script src='https://cdn'></script>", "text/plain": "Board"})
    tried = new_output("execute_result", {"text/plain": "Found: the solution"})
    return new_notebook(cells=[
        new_markdown_cell("# Title\n\nWhat it takes: $p - 1$ rounds.\n\n## Question\n\nHow long?"),
        new_code_cell("guess = Prediction('long?', ['yes', 'no'])\nguess", outputs=[widget]),
        new_markdown_cell("Look at [the next](07_in_stages.ipynb) and `$HOME`."),
        new_code_cell("guess.after(12)", outputs=[table]),
        new_markdown_cell("So it is long.\n\n```\n## no heading\n```\n\n## Exercise"),
        new_code_cell("lines()", outputs=[figure, script]),
        new_code_cell("exercise.check(1)", outputs=[tried]),
    ])  # fmt: skip


def slides(book: Any) -> tuple[str, list[str]]:
    """Returns the page, and the text of each of its slides."""
    code = [cell.source if cell.cell_type == "code" else None for cell in book.cells]
    page = make_slides(book, "06 Title", read_questions(code))
    return page, re.findall(r"<section\s*>(.*?)</section>", page.replace("<section >\n<section", "<section"), re.S)


def test_slides_begin_at_headings_and_show_an_answer_after_its_question() -> None:
    _, parts = slides(lesson())
    assert len(parts) == 5, "title, question, result, what it means, exercise"
    assert "<h1>Title" in parts[0] and "How long?" in parts[1] and "<h2>Exercise" in parts[4]
    assert "<strong>long?</strong>" in parts[1] and "<li>yes</li>" in parts[1]
    assert "12 ms" in parts[2] and "fragment" in parts[2], "the output appears with the next key press"
    assert "So it is long." in parts[3] and "## no heading" in parts[3]
    assert not any("the solution" in part or "Prediction(&#39;" in part.split("<pre>")[-1] for part in parts)


def test_slides_need_no_network() -> None:
    page, parts = slides(lesson())
    loads = re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*["']|@import|<link""", page)
    assert loads == [] and "cdn" not in page.partition('id="plotly"')[0]
    assert "<math" in parts[0] and "$HOME" in parts[2] and "the next" in parts[2]
    assert "data-figure=" in parts[4] and "drawn" in parts[4] and 'id="plotly"' in page
    assert 'id="plotly"' not in slides(new_notebook(cells=[new_markdown_cell("# Title")]))[0]


def test_the_question_on_a_slide_has_the_values_of_the_stored_run() -> None:
    book = lesson()
    book.cells[1].source = "guess = Prediction(f'{run.n} ms, long?', ['yes', 'no'])"
    items = [{"kind": "prediction", "question": "37 ms, long?", "answer": "yes"}]
    sheet = new_output("execute_result", {"text/plain": ""}, metadata={KEY: {"lesson": "06 Title", "items": items}})
    book.cells.append(new_code_cell("worksheet('06 Title')", outputs=[sheet]))
    assert "<strong>37 ms, long?</strong>" in slides(book)[0]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_formulas_of_a_lesson_can_be_shown(path: Path) -> None:
    text = "\n\n".join(cell.source for cell in Lesson(path).book.cells if cell.cell_type == "markdown")
    formulas: list[str] = re.findall(r"\$\$(.+?)\$\$", text, re.S)
    assert [latex for latex in formulas if not write_mathml(latex).startswith("<math")] == []
    assert write_mathml(r"\nosuch<") == r"<code>\nosuch&lt;</code>"


# -- marks


def predicted(question: str, said: str | None, answer: str | None, late: bool = False) -> dict[str, Any]:
    return {"kind": "prediction", "question": question, "late": late} | (
        {"said": said} if said else {}) | ({"answer": answer} if answer else {})  # fmt: skip


def hand_in(folder: Path, name: str, lesson: str, *items: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    sheet = {KEY: {"version": 1, "lesson": lesson, "items": items, "student": name}}
    (folder / f"{lesson[:2]}-{len(list(folder.iterdir()))}.json").write_text(json.dumps(sheet))


IDLE = "4 stages, 4 micro-batches: for how much of the time is a stage idle?"
TURN = "What does 1F1B change, with the same number of micro-batches?"
ABOUT, MEMORY = "about 43%: (p-1) / (m+p-1)", "the memory shrinks: fewer micro-batches in flight"
HALVED = ("0.4 million parameters, Adam. Mixed precision halves the bytes of a parameter and of its gradient. "
          "All model states together are then ...")  # fmt: skip
FEWEST = "How few devices hold seventy billion parameters?"
BUBBLE = {"kind": "exercise", "question": "a bubble of at most 15% with 4 stages", "tries": 2, "right": True}


def homework(folder: Path) -> None:
    """Hands in what the how-to page shows."""
    hand_in(folder, "Ada Lovelace", "07 In stages", predicted(IDLE, ABOUT, ABOUT),
            predicted(TURN, "both shrink", MEMORY, late=True), BUBBLE)  # fmt: skip
    hand_in(folder, "Bob", "06 It does not fit", predicted(HALVED, "half as large", "the same"),
            {"kind": "exercise", "question": FEWEST, "tries": 1})  # fmt: skip
    hand_in(folder, "Bob", "07 In stages", predicted(IDLE, "I do not know", None))


def test_the_commands_of_the_page_print_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    homework(tmp_path / "homework")
    page = ROOT / "docs" / "howto" / "teach_a_class.md"
    _, text = howto_pages.blocks(page, "sh")[0]
    lines = [shlex.split(line)[1:] for line in text.splitlines()]
    results = [say(*line) for line in lines]
    assert [result.exit_code for result in results] == [0, 0], [result.output for result in results]
    ((_, shown),) = howto_pages.blocks(page, "console")
    assert howto_pages.missing_lines(shown, results[1].output) == [], results[1].output
    rows = list(csv.DictReader((tmp_path / "marks.csv").read_text().splitlines()))
    assert [row["student"] for row in rows] == ["Ada Lovelace", "Bob"]
    assert [rows[0][name] for name in ("07.1", "07.2", "07.3", "solved", "of")] == [
        "right", "wrong late", "solved", "1", "6"]  # fmt: skip


def test_a_fixed_answer_counts_more_than_the_sheets_own(tmp_path: Path) -> None:
    asked = {"id": "90.1", "kind": "prediction", "question": "1 + 1?", "choices": ["2", "3"], "answer": "2"}
    about = {"format": "training-workbench answers", "lessons": [{"lesson": "90 Sums", "questions": [asked]}]}
    (tmp_path / "answers.json").write_text(json.dumps(about))
    hand_in(tmp_path / "in", "Eve", "90 Sums", predicted("1 + 1?", "3", "3"))
    hand_in(tmp_path / "in", "Mallory", "91 Other", predicted("1 + 1?", "2", None))
    marks = mark_sheets(tmp_path / "in", tmp_path / "answers.json")
    assert marks.table["90.1"].to_dict() == {"Eve": "wrong", "Mallory": "open"}
    assert marks.notes == ["Mallory, 91 Other: '1 + 1?' is not in the answers"]


def test_without_answers_the_columns_are_what_students_handed_in(tmp_path: Path) -> None:
    homework(tmp_path / "in")
    hand_in(tmp_path / "in", "Bob", "07 In stages", predicted(IDLE, ABOUT, ABOUT))
    hand_in(tmp_path / "in", "=HYPERLINK(1)", "07 In stages", predicted(IDLE, None, None))
    done = say("course", "mark", tmp_path / "in", "--out", tmp_path / "m.csv")
    assert "Bob, 07.1: handed in twice; the last file by name counts" in done.output
    table = {row["student"]: row for row in csv.DictReader((tmp_path / "m.csv").read_text().splitlines())}
    assert set(table) == {"Ada Lovelace", "Bob", "'=HYPERLINK(1)"}, "a spreadsheet must not run a name"
    assert table["Bob"]["07.1"] == "right" and table["Bob"]["of"] == "5"


def test_a_folder_or_a_file_that_cannot_be_marked_is_refused_by_name(tmp_path: Path) -> None:
    assert "nowhere: is not a folder" in refused(say("course", "mark", tmp_path / "nowhere"))
    (tmp_path / "in").mkdir()
    assert "contains no worksheet" in refused(say("course", "mark", tmp_path / "in"))
    homework(tmp_path / "in")
    wrong = tmp_path / "wrong.json"
    for text in ("{", "[]", '{"format": "training-workbench answers", "lessons": [1]}'):
        wrong.write_text(text)
        said = refused(say("course", "mark", tmp_path / "in", "--answers", wrong))
        assert "is not the answers.json of a hand-out" in said
    with pytest.raises(RunError, match="cannot be read"):
        mark_sheets(tmp_path / "in", tmp_path / "missing.json")
