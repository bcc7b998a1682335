"""Takes a member's docstring apart, for pages, lessons and `help`.

A docstring has a summary as its first paragraph and may have an algorithm in indented paragraphs. Further paragraphs
may begin `When to use it:` or `Reference:`.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

WHEN, PAPER = "When to use it:", "Reference:"
TERM = re.compile(r"\w+: {2,}")  # begins a list of terms


@dataclass(frozen=True)
class Told:
    """A docstring in parts, each without its heading; "" for a missing part.

    formula: the first of its indented paragraphs, as written
    rest:    the remaining paragraphs, in order
    """

    what: str
    formula: str
    when: str
    paper: str
    rest: tuple[str, ...]


def told(member: type[Any]) -> Told:
    """Returns the parts of the docstring of `member`."""
    what, *rest = paragraphs(inspect.cleandoc(member.__doc__ or "")) or [""]
    pick = {key: next((p for p in rest if p.startswith(key)), "") for key in (WHEN, PAPER)}
    rest = [p for p in rest if p not in pick.values()]
    formula = rest.pop(0) if rest and is_code(rest[0]) else ""
    when, paper = (" ".join(pick[key].removeprefix(key).split()) for key in (WHEN, PAPER))
    return Told(what, formula, when, paper, tuple(rest))


def paragraphs(doc: str) -> list[str]:
    """Returns the paragraphs of a docstring; joins consecutive indented ones."""
    found: list[str] = []
    for part in re.split(r"\n\s*\n", doc.strip("\n")):
        if found and is_code(part) and is_code(found[-1]):
            found[-1] += f"\n\n{part}"
        elif part.strip():
            found.append(part)
    return found


def is_code(paragraph: str) -> bool:
    """Whether the paragraph is indented, as an algorithm is."""
    return paragraph.startswith("    ")


def terms(doc: str) -> Iterator[tuple[str, str]]:
    """Yields (term, meaning) for lines `term: meaning` of a docstring and their continuations."""
    for part in paragraphs(doc):
        if re.match(r"\w[\w, ]*: ", part) and not part.startswith((WHEN, PAPER)):
            for found in re.finditer(r"^(\w[\w, ]*): +(.*(?:\n +.*)*)", part, re.M):
                yield found[1], " ".join(found[2].split())


def source(member: type[Any]) -> str:
    """Returns the source of a class without its docstring; "" if it is unavailable."""
    try:
        text = textwrap.dedent(inspect.getsource(member))
    except (OSError, TypeError):
        text = _in_a_cell(member)
    if not text:
        return ""
    body = ast.parse(text).body[0]
    assert isinstance(body, ast.ClassDef)
    first = body.body[0]
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        return text.strip()
    lines = text.splitlines()
    del lines[first.lineno - 1 : first.end_lineno]
    while len(lines) >= first.lineno and not lines[first.lineno - 1].strip():
        del lines[first.lineno - 1]
    return "\n".join(lines).strip()


def _in_a_cell(member: type[Any]) -> str:
    """Returns the source of a class from a notebook cell, by one of its methods; or "".

    Such a class has no file.
    """
    for method in filter(inspect.isfunction, vars(member).values()):
        try:
            lines, _ = inspect.findsource(method)
        except OSError:  # a method that dataclass generated
            continue
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and _is(node, member, method.__code__):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
    return ""


def _is(node: ast.ClassDef, member: type[Any], code: CodeType) -> bool:
    return member.__qualname__.endswith(node.name) and node.lineno <= code.co_firstlineno <= (node.end_lineno or 0)
