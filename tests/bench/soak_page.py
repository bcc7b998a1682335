"""Writes the part of docs/reliability.md about an hour of training with eight ranks, and what grew in it."""

from __future__ import annotations

import statistics
from textwrap import fill
from typing import Any

FLAT = 0.05  # smaller growth counts as flat
ALONE = {"kernel pss": "the kernel, MB", "record": "the record in its memory, MB",
         "kernel pss without the record": "the kernel without the record, MB",
         "kernel anonymous without the record": "the same, pages of its own, MB",
         "controller pss": "ipyparallel's controller, MB", "kernel descriptors": "descriptors of the kernel",
         "kernel threads": "threads of the kernel", "controller descriptors": "descriptors of the controller",
         "disk": "the run directory, MB"}  # fmt: skip
EACH = {"pss": "MB", "anonymous": "MB of pages of its own", "descriptors": "descriptors", "threads": "threads"}
GROWS = ("kernel pss", "record", "disk")  # with the record, which is kept whole
MEASURED = """Memory is a process's proportional share (Pss), read every ten seconds; since that of a file goes up when
another process that maps it ends, and down when one begins, also the pages that are no file's (Anonymous). Engines
are those that were there from the beginning to the end. The record is kept whole, in memory and on disk, so it grows
with the rows."""


def text(found: dict[str, Any]) -> str:
    """Returns the actions and the measurements of the hour, or a sentence if there are none."""
    if not found:
        return "Not run yet: `make soak`."
    done, read, wrong = found["done"], found["page"], found["wrong"]
    back = f" ({statistics.median(found['back']):.0f} s until as many train, in the median)" if found["back"] else ""
    about = f"""`make soak`: {found["ranks"]} ranks train for {found["minutes"]:g} minutes on two shared cores,
and come to step {found["steps"]:,}. {done["applied"]} live changes were applied and {done.get("refused", 0)} refused
in words, {done.get("killed", 0)} engines killed and replaced{back}, and {done.get("checkpoints", 0)} checkpoints asked
for besides those that are made by themselves. A page read the dashboard meanwhile: {read["messages"]:,} messages,
{read["mb"]:g} MB, {read["longest"] / 1e6:.1f} MB the longest; it was loaded anew {read["opened"] - 1} times."""
    said = f"{len(wrong)} went wrong:\n\n" + "\n".join(f"- {one.splitlines()[0][:300]}" for one in wrong)
    notes = "\n".join(f"- {note}" for note in found.get("notes", ()))  # by hand: causes, and other load
    return "\n\n".join([fill(about, 120), said if wrong else "Nothing went wrong.", MEASURED, table(found["grown"]),
                        verdict(found["grown"]), *([notes] if notes else [])])  # fmt: skip


def rows(grown: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    """Returns the table's rows: single quantities, and of engines the one that grew most."""
    of = {unit: [x for name, x in grown.items() if name.startswith("rank ") and name.endswith(f" {unit}")]
          for unit in EACH}  # fmt: skip
    engines = [(f"the engine that grew most, of {len(x)}: {EACH[unit]}", max(x, key=lambda one: one[2]))
               for unit, x in of.items() if x]  # fmt: skip
    return [(words, grown[name]) for name, words in ALONE.items() if name in grown] + engines


def table(grown: dict[str, list[float]]) -> str:
    """Returns a table of medians of minutes 10 to 20 and of the last ten."""
    lines = ["| | minutes 10 to 20 | the last ten minutes | times |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {words} | {a:g} | {b:g} | {times:.2f} |" for words, (a, b, times) in rows(grown)])


def verdict(grown: dict[str, list[float]]) -> str:
    """Returns a sentence on which of these are flat."""
    if not grown:
        return "It was too short to say what grows."
    growing = [ALONE[name] for name in GROWS]
    more = [f"{words} ({times:.2f})" for words, (_, _, times) in rows(grown)
            if words not in growing and times > 1 + FLAT]  # fmt: skip
    return f"Not within {FLAT:.0%}: {', '.join(more)}." if more else f"All but the record is flat within {FLAT:.0%}."
