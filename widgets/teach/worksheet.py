"""A student's work in a lesson, in the notebook or a file: predictions, tries and hints.

    worksheet("05 Talk less often")                       # the last cell of a lesson
    worksheet("13 Talk less often").hand_in("Ada")        # 13_talk_less_often-ada.json next to the notebook
    handed_in("homework")                                 # the teacher's table, of such files and of notebooks

One kernel serves one lesson. It remembers the work and identifies a question by its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from workbench.settings import KnobError, short

if TYPE_CHECKING:
    import pandas as pd

KEY = "training-workbench"  # in the metadata of a cell's output
MAX_FILE_BYTES = 20 << 20  # bytes of a readable file; notebooks contain pictures
MAX_KEPT_TRIES = 20  # last tries to keep; all are counted
LEFT = 'style="text-align: left"'  # pages align tables to the right, for numbers
COLUMNS = ("student", "lesson", "kind", "question", "said", "answer", "right", "late", "tries", "hints")

_done: dict[tuple[str, str], dict[str, Any]] = {}


def store_note(kind: str, question: str, **what: Any) -> dict[str, Any]:
    """Stores `what` about a "prediction" or an "exercise". Returns everything stored about it."""
    known = _done.setdefault((kind, question), {"kind": kind, "question": question})
    known.update(what)
    return known


def count_try(question: str, answer: str, right: bool) -> None:
    """Counts a try at an exercise."""
    known = store_note("exercise", question)
    known["tries"] = known.get("tries", 0) + 1
    known["answers"] = [*known.get("answers", []), answer][-MAX_KEPT_TRIES:]
    known["right"] = bool(known.get("right")) or right


def store_hints(question: str, hints: int) -> None:
    """Stores the number of hints used."""
    known = store_note("exercise", question)
    known["hints"] = max(hints, known.get("hints", 0))


def worksheet(lesson: str) -> Worksheet:
    """Returns the work in this notebook so far. lesson: its number and name"""
    if not isinstance(lesson, str) or not lesson.strip() or len(lesson) > 100:
        raise KnobError(f"lesson={short(lesson)}: must be the lesson's name, such as '05 Talk less often'")
    return Worksheet(lesson, [dict(known) for known in _done.values()])


class Worksheet:
    """A table at the end of a lesson. The notebook keeps it as text and as data."""

    def __init__(self, lesson: str, items: list[dict[str, Any]]) -> None:
        self.lesson, self.items = lesson, items

    def hand_in(self, name: str, folder: Path | str = ".") -> str:
        """Writes the sheet to a file. Returns a message. Raises KnobError without a `name`."""
        if not isinstance(name, str) or not name.strip() or len(name) > 100 or not name.isprintable():
            raise KnobError(f"name={short(name)}: must be your name")
        path = Path(folder, f"{_plain_name(self.lesson)}-{_plain_name(name)}.json")
        sheet = {KEY: {**self._to_json(), "student": name.strip()}}
        path.write_text(json.dumps(sheet, indent=1, ensure_ascii=False), "utf8")
        return f"Handed in: {path}, {path.stat().st_size} bytes. Send this one file to your teacher."

    def _to_json(self) -> dict[str, Any]:
        return {"version": 1, "lesson": self.lesson, "items": self.items}

    def _list_rows(self) -> Iterator[tuple[str, str, str]]:
        for item in self.items:
            if item["kind"] == "prediction":
                late = ", when the run had begun" if item.get("late") else ""
                said = f"you said: {item.get('said') or 'nothing'}{late}"
                yield item["question"], said, f"the record: {item['answer']}" if item.get("answer") else "not shown yet"
                continue
            n, hints = item.get("tries", 0), item.get("hints", 0)
            done = "solved" if item.get("right") else "not solved yet" if n else "not tried yet"
            told = f"{n} {'try' if n == 1 else 'tries'}, {hints} {'hint' if hints == 1 else 'hints'}"
            yield item["question"], told, done

    def __repr__(self) -> str:
        return "\n".join([f"Worksheet of {self.lesson}", *("; ".join(row) for row in self._list_rows())])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = [("asked", "you", "outcome"), *self._list_rows()]
        head, *cells = ["".join(f"<{tag} {LEFT}>{escape(text)}</{tag}>" for text in row)
                        for tag, row in zip(["th", *["td"] * len(self.items)], rows, strict=True)]  # fmt: skip
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else "<p>nothing yet</p>"
        html = f"<p><b>{escape(self.lesson)}: what you did</b></p>{table}"
        return {"text/html": html, "text/plain": repr(self)}, {KEY: self._to_json()}


def handed_in(folder: Path | str) -> pd.DataFrame:
    """Returns all sheets of a folder's files and notebooks, with a row per question.

    student: the name on the sheet; for a notebook, its file's name
    said, answer: a prediction and the record's answer
    right: whether the two are equal, or the exercise was solved
    late: whether the student predicted when the run had begun

    Skips files without a sheet.
    """
    import pandas as pd

    rows = []
    for path in sorted(p for p in Path(folder).iterdir() if p.suffix in (".json", ".ipynb")):
        for sheet in _read_sheets(path):
            for item in sheet["items"]:
                said, answer = item.get("said"), item.get("answer")
                right = bool(item.get("right")) if item["kind"] == "exercise" else said is not None and said == answer
                whose = {"student": sheet.get("student") or path.stem, "lesson": sheet["lesson"], "right": right}
                rows.append({**item, **whose, "late": bool(item.get("late"))})
    return pd.DataFrame(rows, columns=list(COLUMNS)).fillna({"tries": 0, "hints": 0})


def _read_sheets(path: Path) -> list[dict[str, Any]]:
    """Returns a file's sheet. For a notebook, returns each lesson's last sheet."""
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return []
    try:
        found = json.loads(path.read_text("utf8"))
    except ValueError:
        return []
    if not isinstance(found, dict):
        return []
    held = [found.get(KEY)]
    for cell in found.get("cells", ()):
        held += [output.get("metadata", {}).get(KEY) for output in cell.get("outputs", ())]
    mine = [sheet for sheet in held if _is_valid(sheet) and not sheet.get("stored")]  # not those of the course itself
    return list({sheet["lesson"]: sheet for sheet in mine}.values())


def _is_valid(sheet: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a sheet is valid; it may come from anyone."""
    return (isinstance(sheet, dict) and isinstance(sheet.get("lesson"), str) and isinstance(sheet.get("items"), list)
            and all(isinstance(i, dict) and isinstance(i.get("kind"), str) for i in sheet["items"]))  # fmt: skip


def _plain_name(name: str) -> str:
    return re.sub(r"\W+", "_", name.strip().lower()).strip("_") or "nobody"
