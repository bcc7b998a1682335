"""The README's tables of strategies and compressors, written from the code: `python -m tests.tables README.md`.

Text between `<!-- strategies -->` and `<!-- end -->` (and likewise for other families) is replaced.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from workbench.compressors import Compressor
from workbench.fabric import Fault
from workbench.family import Family, members
from workbench.knobs import Knob, describe
from workbench.strategies import Strategy
from workbench.tasks import TaskBase

FAMILIES: dict[str, tuple[type[Family], tuple[str, ...]]] = {
    "strategies": (Strategy, ("exact", "lockstep", "periodic")),
    "compressors": (Compressor, ("linear", "unbiased", "contraction")),
    "faults": (Fault, ()),
    "tasks": (TaskBase, ()),
}


def table(name: str) -> str:
    """One family as a Markdown table: name, what it is, what it claims, its knobs."""
    base, claims = FAMILIES[name]
    rows = ["| name | what it is | " + ("claims | " if claims else "") + "knobs |"]
    rows.append("|---|---|" + ("---|" if claims else "") + "---|")
    for member in members(base).values():
        if not member.__module__.startswith("workbench."):
            continue
        about = describe(member)
        held = ", ".join(c for c in claims if getattr(member, c)) or "none"
        knobs = "<br>".join(map(word, about["knobs"])) or "none"
        rows.append(f"| `{about['name']}` | {about['doc']} | " + (f"{held} | " if claims else "") + f"{knobs} |")
    return "\n".join(rows)


def word(k: Knob) -> str:
    """A knob in a few words."""
    return f"`{k.name}`: {k.doc}; {k.allowed}"


def filled(text: str) -> str:
    """`text` with every table between its markers as the code says now."""
    for name in FAMILIES:
        now = f"<!-- {name} -->\n{table(name)}\n<!-- end -->"
        text = re.sub(f"<!-- {name} -->.*?<!-- end -->", lambda _, now=now: now, text, flags=re.S)
    return text


def main(path: Path) -> None:
    path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
