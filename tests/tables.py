"""What pages copy from the code, written by `python -m tests.tables PAGE ...`.

Text between `<!-- strategies -->` and `<!-- end -->` (and likewise for other families) becomes a table; between
`<!-- code FILE NAME ... -->` and `<!-- end -->` the source of these classes and functions.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from workbench.compressors import Compressor
from workbench.fabric import Fault
from workbench.family import Family, members
from workbench.knobs import Knob, describe
from workbench.optimizers import Optimizer
from workbench.strategies import Strategy
from workbench.tasks import TaskBase

ROOT = Path(__file__).parent.parent
FAMILIES: dict[str, tuple[type[Family], tuple[str, ...]]] = {
    "strategies": (Strategy, ("exact", "lockstep", "periodic")),
    "compressors": (Compressor, ("linear", "unbiased", "contraction")),
    "optimizers": (Optimizer, ()),
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
    """`text` with every table and every piece of code between its markers as the code says now."""
    for name in FAMILIES:
        now = f"<!-- {name} -->\n{table(name)}\n<!-- end -->"
        text = re.sub(f"<!-- {name} -->.*?<!-- end -->", lambda _, now=now: now, text, flags=re.S)
    return re.sub("<!-- code (\\S+) (.*?) -->.*?<!-- end -->", _shown, text, flags=re.S)


def code(path: str, names: list[str]) -> str:
    """The source of these top-level classes and functions of a file, decorators and all."""
    text = (ROOT / path).read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return "\n\n\n".join(found[name] for name in names)


def _shown(match: re.Match[str]) -> str:
    path, names = match.groups()
    return f"<!-- code {path} {names} -->\n```python\n{code(path, names.split())}\n```\n<!-- end -->"


def main(*pages: Path) -> None:
    for page in pages:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
