"""Writes the part of docs/project/reliability.md about damaged files."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.damage import COUNT, DIGITS

ABOUT = f"""`make damage` changes one file of a checkpoint, or of a record, and reads it again. It does so {COUNT:,}
times for each, by seed. {DIGITS:,} seeds change a digit of the checkpoint's manifest. Reading a checkpoint is right if
it gives the same values, or a `RunError` that names the file and the older checkpoint. Reading a record is right if it
gives the same rows, or fewer rows with a line in `run.warnings`, or a `RunError`. A file that was cut between two
batches looks like the file of a killed rank, so its rows may end early without a warning. For some seeds the test also
resumes the checkpoint, or draws the record as a page.
"""
WAYS = {
    "digit of the manifest": "a digit of the manifest", "digit": "a digit", "flip": "a flipped bit",
    "set_byte": "another byte", "clear": "a stretch of zeros", "repeat": "a stretch copied over another stretch",
    "insert": "bytes inserted", "leave_out": "bytes removed", "cut": "end cut off",
    "append": "bytes appended",
    "swap": "two files swapped", "remove": "a file removed",
    "replace": "a link, a pipe or a folder in place of a file",
}  # fmt: skip
OUTCOMES = {"refused": "refused", "warned": "read with a warning", "same": "the same values",
            "shorter": "cut between batches", "wrong": "wrong"}  # fmt: skip


def describe(found: dict[str, Any]) -> str:
    """Returns the section's text."""
    if not found:
        return f"{ABOUT}\nNot measured yet.\n"
    return "\n".join([ABOUT, *(tell(name, one) for name, one in sorted(found.items()))])


def tell(name: str, found: dict[str, Any]) -> str:
    """Returns the results of the changes to a checkpoint or a record."""
    left = f" **{COUNT - found['next']:,} of {COUNT:,} are not made yet.**" if found["next"] < COUNT else ""
    head = f"A {name}: {found['next']:,} changes, {len(found['wrong'])} wrong.{left}\n"
    lines = [f"| change | {' | '.join(OUTCOMES.values())} |", "| --- " * (len(OUTCOMES) + 1) + "|"]
    for way, words in WAYS.items():
        if counts := found["ways"].get(way):
            row = Counter({outcome if outcome in OUTCOMES else "wrong": n for outcome, n in counts.items()})
            lines.append(f"| {words} | {' | '.join(f'{row[outcome]:,}' for outcome in OUTCOMES)} |")
    wrong = [f"- seed {one['seed']}, {one['file']}, {one['way']}: {one['outcome']}: {one['text'][:200]}"
             for one in found["wrong"]]  # fmt: skip
    return "\n".join([head, *lines, *(["", *wrong] if wrong else []), ""])
