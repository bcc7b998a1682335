"""Marks handed-in worksheets: one row per student, one column per question.

    mark_sheets("homework", "handout/answers.json").table

The answers are those of a hand-out. The work itself comes from `handed_in`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widgets.course.handout import FORMAT, matches_choice
from widgets.course.questions import Question
from widgets.teach.worksheet import MAX_FILE_BYTES, handed_in
from workbench.run import RunError
from workbench.settings import short

if TYPE_CHECKING:
    import pandas as pd

OPEN = "open"  # the mark of a question without an answer


@dataclass(frozen=True)
class Marks:
    """Marks of a folder of worksheets.

    table: a row per student; a column per question, then `right`, `solved` and `of`, the number of questions
    notes: sentences about worksheets that do not fit the answers
    """

    table: pd.DataFrame
    notes: list[str]


@dataclass(frozen=True)
class _Asked:
    """A question of `answers.json`."""

    name: str
    lesson: str
    question: Question

    def is_for(self, row: Any) -> bool:
        """Whether a row of `handed_in` answers this question."""
        return row.lesson == self.lesson and _has(row.question) and self.question.asks(row.kind, row.question)


def mark_sheets(folder: Path | str, answers: Path | str | None = None) -> Marks:
    """Marks all worksheets of a folder. Without `answers`, the columns are the questions of the worksheets.

    Raises RunError if the folder has no worksheet, or if `answers` is not a file of a hand-out.
    """
    if not Path(folder).is_dir():
        raise RunError(f"{folder}: is not a folder; name the folder with the students' files")
    rows = list(handed_in(folder).itertuples(index=False))
    if not rows:
        raise RunError(f"{folder}: contains no worksheet; students write one with worksheet(...).hand_in(name)")
    asked = _list_asked(rows) if answers is None else _read_answers(Path(answers))
    notes: list[str] = []
    marks: dict[str, dict[str, str]] = {}
    for row in rows:
        mine = marks.setdefault(str(row.student), {one.name: OPEN for one in asked})
        found = next((one for one in asked if one.is_for(row)), None)
        if found is None:
            notes.append(f"{row.student}, {row.lesson}: {short(row.question)} is not in the answers")
            continue
        if mine[found.name] != OPEN:
            notes.append(f"{row.student}, {found.name}: handed in twice; the last file by name counts")
        mine[found.name] = _mark(row, found.question)
        if row.kind == "prediction" and _has(row.said) and not matches_choice(found.question.choices, str(row.said)):
            notes.append(f"{row.student}, {found.name}: {short(row.said)} is not a choice of the question")
    return Marks(_make_table(marks, [one.name for one in asked]), notes)


def _has(value: Any) -> bool:
    return isinstance(value, str)  # pandas stores a missing text as NaN


def _mark(row: Any, question: Question) -> str:
    if row.kind == "exercise":
        return "solved" if row.right else "tried" if row.tries else OPEN
    if not _has(row.said):
        return OPEN
    truth = question.answer or row.answer
    if not _has(truth):
        return "unseen"
    late = " late" if row.late else ""
    return ("right" if row.said == truth else "wrong") + late


def _make_table(marks: dict[str, dict[str, str]], names: Sequence[str]) -> pd.DataFrame:
    import pandas as pd

    table = pd.DataFrame.from_dict(dict(sorted(marks.items())), orient="index", columns=list(names))
    table = table.rename_axis("student")
    return table.assign(
        right=table.isin(["right", "right late"]).sum(axis=1), solved=(table == "solved").sum(axis=1), of=len(names)
    )


def _list_asked(rows: Sequence[Any]) -> list[_Asked]:
    """Returns the questions of the worksheets themselves, numbered by lesson."""
    asked: list[_Asked] = []
    for row in sorted(rows, key=lambda row: row.lesson):
        if _has(row.question) and not any(one.is_for(row) for one in asked):
            number = 1 + sum(one.lesson == row.lesson for one in asked)
            name = f"{row.lesson.split()[0] if row.lesson.split() else 'lesson'}.{number}"
            asked.append(_Asked(name, row.lesson, Question(0, row.kind, row.question, ("…",))))
    return asked


def _read_answers(path: Path) -> list[_Asked]:
    wrong = RunError(f"{path}: is not the answers.json of a hand-out; workbench course export writes one")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise wrong
        held = json.loads(path.read_text("utf8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise wrong from error
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        raise wrong
    try:
        return [_Asked(one["id"], lesson["lesson"], Question(
                    0, one["kind"], one["question"], tuple(one.get("choices", ())), one["answer"]))
                for lesson in held["lessons"] for one in lesson["questions"]]  # fmt: skip
    except (KeyError, TypeError) as error:
        raise wrong from error
