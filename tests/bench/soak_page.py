"""Writes the part of docs/project/reliability.md about an hour of training with eight ranks, and what grew in it."""

from __future__ import annotations

import statistics
from textwrap import fill
from typing import Any

FLAT = 0.05  # smaller growth counts as flat
ALONE = {"kernel pss": "the kernel, MB", "record": "the record in its memory, MB",
         "kernel pss without the record": "the kernel without the record, MB",
         "kernel anonymous without the record": "the kernel without the record, anonymous pages, MB",
         "controller pss": "ipyparallel's controller, MB", "kernel descriptors": "descriptors of the kernel",
         "kernel threads": "threads of the kernel", "controller descriptors": "descriptors of the controller",
         "disk": "the run directory, MB"}  # fmt: skip
EACH = {"pss": "MB", "anonymous": "MB of anonymous pages", "descriptors": "descriptors", "threads": "threads"}
GROWS = ("kernel pss", "record", "disk")  # with the record, which is kept whole
MEASURED = """Memory is a process's proportional share (Pss), read every ten seconds. The share of a mapped file changes
when other processes map it or end. So the table also has the pages that belong to no file (anonymous). The rows on
engines show engines that lasted for the whole run. The record stays complete, in memory and on disk, so it grows with
the rows."""


def text(found: dict[str, Any]) -> str:
    """Returns the actions and the measurements of the hour, or a sentence if there are none."""
    if not found:
        return "Not run yet: `make soak`."
    done, read, wrong = found["done"], found["page"], found["wrong"]
    back = f" ({statistics.median(found['back']):.0f} s until as many ranks train, median)" if found["back"] else ""
    about = f"""`make soak`: {found["ranks"]} ranks train for {found["minutes"]:g} minutes on two shared cores,
and reach step {found["steps"]:,}. The ranks applied {done["applied"]} live changes and refused
{done.get("refused", 0)}. {done.get("killed", 0)} engines were killed and replaced{back}. In addition to the planned
checkpoints, {done.get("checkpoints", 0)} checkpoints were requested. A page read the dashboard:
{read["messages"]:,} messages with {read["mb"]:g} MB. The longest message had {read["longest"] / 1e6:.1f} MB. The page
was loaded again {read["opened"] - 1} times."""
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
    lines = ["| | minutes 10 to 20 | the last ten minutes | ratio |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {words} | {a:g} | {b:g} | {times:.2f} |" for words, (a, b, times) in rows(grown)])


def verdict(grown: dict[str, list[float]]) -> str:
    """Returns a sentence on which of these are flat."""
    if not grown:
        return "It was too short to say what grows."
    growing = [ALONE[name] for name in GROWS]
    more = [f"{words} ({times:.2f})" for words, (_, _, times) in rows(grown)
            if words not in growing and times > 1 + FLAT]  # fmt: skip
    most = f"{100 * FLAT:.0f} %"
    if not more:
        return f"Nothing grew by more than {most}, except for the record."
    return f"Grew by more than {most}: {', '.join(more)}."
