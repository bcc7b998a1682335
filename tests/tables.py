"""Writes copies of code into pages: `python -m tests.tables PAGE ...` (`make tables`: all pages).

Between `<!-- reference NAME -->` and `<!-- end -->` it writes a family (or settings, verbs, views) from
`tests/reference.py`. `<!-- api NAME -->` begins public names from `tests/api.py`, and `<!-- commands -->` the command
line. Between `<!-- code FILE NAME ... -->` and `<!-- end -->` it writes the source of these classes and functions, or
of the whole file without names. It also writes each `__init__.pyi`, which lists importable names for editors, and the
README's badges.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import workbench
from tests import api, badges, command_line, reference
from workbench.settings import shipped

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "project" / "shapes.md",
    *sorted((ROOT / "docs" / "reference").rglob("*.md")),
]
STUBS = [ROOT / "workbench" / "__init__.pyi", *sorted((ROOT / "workbench").glob("*/__init__.pyi"))]


def filled(text: str) -> str:
    """Returns `text` with everything between its markers generated from the code."""
    text = re.sub("<!-- reference (\\S+) -->.*?<!-- end -->", _told, text, flags=re.S)
    text = re.sub("<!-- api (\\S+) -->.*?<!-- end -->", _documented, text, flags=re.S)
    told = f"<!-- commands -->\n{command_line.page()}\n<!-- end -->"
    text = re.sub("<!-- commands -->.*?<!-- end -->", lambda _: told, text, flags=re.S)
    return re.sub("<!-- code (\\S+)(.*?) -->.*?<!-- end -->", _shown, text, flags=re.S)


def code(path: str, names: list[str]) -> str:
    """Returns the source of these top-level classes and functions of a file, with decorators."""
    text = (ROOT / path).read_text()
    if not names:
        return text.rstrip()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return "\n\n\n".join(found[name] for name in names)


def stub(path: Path) -> str:
    """Returns a package's `__init__.pyi`: its imports by name, and every member in its folder."""
    package = ".".join(path.parent.relative_to(ROOT).parts)
    own = re.findall(r"^from \S+ import (?:\w+) as \w+$", path.with_suffix(".py").read_text(), re.M)
    found = workbench.public_names() if package == "workbench" else shipped(package)
    lines = {*own, *(f"from {home} import {name} as {name}" for name, home in found.items())}
    more = ["", "__version__: str", "", "def public_names() -> dict[str, str]: ..."] if package == "workbench" else []
    return "\n".join(["# Written by `make tables`, for editors and type checkers.", *sorted(lines), *more, ""])


def _told(match: re.Match[str]) -> str:
    return f"<!-- reference {match[1]} -->\n{reference.part(match[1])}\n<!-- end -->"


def _documented(match: re.Match[str]) -> str:
    return f"<!-- api {match[1]} -->\n{api.part(match[1])}\n<!-- end -->"


def _shown(match: re.Match[str]) -> str:
    path, names = match.groups()
    return f"<!-- code {path}{names} -->\n```python\n{code(path, names.split())}\n```\n<!-- end -->"


def main(*pages: Path) -> None:
    for page in pages or PAGES:
        page.write_text(filled(page.read_text()))
    for path in () if pages else STUBS:
        path.write_text(stub(path))
    if not pages:
        badges.write()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
