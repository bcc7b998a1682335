"""Makes a folder that a teacher hands out: notebooks, slides, answers and a page for the teacher."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from widgets.course.parts import read_part
from widgets.course.questions import UNKNOWN, Question, matches, read_questions
from widgets.course.slides import make_links_plain, make_slides
from widgets.teach.worksheet import KEY
from workbench.run import RunError

ANSWERS = "answers.json"
FORMAT = "training-workbench answers"
BY_RECORD = "The record decides. A student's worksheet has the answer of that student's run next to the prediction."
BY_CHECK = "The exercise checks itself. The worksheet says whether the student solved it, in how many tries and hints."
BY_TEXT = "The lesson's text fixes the answer."


@dataclass(frozen=True)
class Lesson:
    """A lesson's notebook."""

    path: Path

    @property
    def number(self) -> str:
        return self.path.name[:2]

    @cached_property
    def book(self) -> NotebookNode:
        return nbformat.read(self.path, as_version=4)

    @property
    def title(self) -> str:
        """Its number and name, as on a worksheet."""
        found = re.search(r"^# (.+)$", self.book.cells[0].source, re.M)
        return f"{self.number} {found[1] if found else self.path.stem[3:]}"

    @cached_property
    def questions(self) -> list[Question]:
        return read_questions([cell.source if cell.cell_type == "code" else None for cell in self.book.cells])

    def list_answers(self) -> dict[str, Any]:
        """Returns the lesson's part of `answers.json`."""
        stored = self._list_stored_items()
        asked = [_describe(f"{self.number}.{n}", question, stored) for n, question in enumerate(self.questions, 1)]
        return {"lesson": self.title, "notebook": self.path.name, "questions": asked}

    def _list_stored_items(self) -> list[dict[str, Any]]:
        """Returns the worksheet in the notebook's stored outputs."""
        held = [output.get("metadata", {}).get(KEY) for cell in self.book.cells for output in cell.get("outputs", ())]
        return [item for sheet in held if sheet for item in sheet["items"]]

    def make_notebook(self, kept: Sequence[str]) -> str:
        """Returns the notebook without outputs. Links to files outside of `kept` become plain text."""
        book = nbformat.from_dict(self.book)
        for name in ("widgets", KEY):
            book.metadata.pop(name, None)
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
                cell.metadata.pop("jupyter", None)
            elif cell.cell_type == "markdown":
                cell.source = make_links_plain(cell.source, kept)
        return nbformat.writes(book) + "\n"


def _describe(name: str, question: Question, stored: Sequence[dict[str, Any]]) -> dict[str, Any]:
    told: dict[str, Any] = {"id": name, "kind": question.kind, "question": question.text}
    if question.kind == "exercise":
        return {**told, "answer": None, "note": BY_CHECK}
    told |= {"choices": list(question.choices), "answer": question.answer}
    if question.answer is not None:
        return {**told, "note": BY_TEXT}
    mine = [item.get("answer") for item in stored if question.asks(item["kind"], item["question"])]
    seen = {"answer in the stored run": mine[-1]} if mine and mine[-1] else {}
    return {**told, **seen, "note": BY_RECORD}


def export_course(folder: Path, wanted: Sequence[str], to: Path, slides: bool = True) -> list[Path]:
    """Writes the hand-out and returns its files.

    folder: the notebooks
    wanted: the numbers of lessons; none: all lessons
    to:     a new or an empty folder

    Raises RunError for an unknown lesson, for a folder with content and without nbconvert.
    """
    lessons = find_lessons(folder, wanted)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunError(f"{to}: already exists and is not empty; name a new folder with --to")
    files = make_handout(lessons, slides)
    written = []
    for name, text in files.items():
        path = to / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf8")
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}); name another folder with --to") from error
        written.append(path)
    return written


def find_lessons(folder: Path, wanted: Sequence[str]) -> list[Lesson]:
    """Returns these lessons by number, without repetitions. Raises RunError for an unknown one."""
    known = {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    for number in wanted:
        if number.zfill(2) not in known:
            raise RunError(f"lesson {number}: does not exist; the lessons are {', '.join(known)}")
    chosen = sorted({number.zfill(2) for number in wanted}) or list(known)
    return [Lesson(known[number]) for number in chosen]


def make_handout(lessons: Sequence[Lesson], slides: bool) -> dict[str, str]:
    """Returns the text of each file of a hand-out by path."""
    kept = [lesson.path.name for lesson in lessons]
    files = {f"notebooks/{lesson.path.name}": lesson.make_notebook(kept) for lesson in lessons}
    try:
        for lesson in lessons if slides else ():
            page = make_slides(lesson.book, lesson.title, lesson.questions)
            files[f"slides/{lesson.path.stem}.slides.html"] = page
    except ImportError as error:
        missing = error.name or "nbconvert"
        told = f"slides need {missing}, which is not installed; run pip install {missing}, or pass --no-slides"
        raise RunError(told) from error
    about = {
        "format": FORMAT, "version": 1,
        "about": f"{UNKNOWN} in a question or a choice stands for a value that the student's run computes.",
        "lessons": [lesson.list_answers() for lesson in lessons],
    }  # fmt: skip
    files[ANSWERS] = json.dumps(about, indent=1, ensure_ascii=False) + "\n"
    files["README.md"] = _make_readme(lessons, slides)
    return files


def _make_readme(lessons: Sequence[Lesson], slides: bool) -> str:
    rows = []
    for lesson in lessons:
        kinds = [question.kind for question in lesson.questions]
        page = f"[slides](slides/{lesson.path.stem}.slides.html)" if slides else "none"
        notebook = f"[{lesson.title}](notebooks/{lesson.path.name})"
        rows.append(f"| {notebook} | {page} | {kinds.count('prediction')} | {kinds.count('exercise')} |")
    text = read_part("handout.md")
    if not slides:
        text = re.sub(r"\n## Show the slides\n.*?(?=\n## |\Z)", "", text, flags=re.S)
    return text.replace("ROWS", "\n".join(rows))


def matches_choice(choices: Sequence[str], said: str) -> bool:
    """Whether a worksheet's answer is one of a question's choices."""
    return any(matches(choice, said) for choice in choices)
