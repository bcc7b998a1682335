"""What a member's code is, apart from its words: two of the same hash do the same."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
from functools import cache
from types import ModuleType

# For whoever lists members, for the laws, and for a switch, before which no cell has anything that these are about.
LABELS = ("kinds", "kind", "starter", "plain", "own", "drops", "formerly_called", "skips", "follows")
SHOWN = ("doc", "unit", "log")  # of a knob: what only people see


@cache
def code(cls: type) -> str:
    """A hash of a strategy's file and of the private files of its family that it imports, without their words."""
    todo, seen = [sys.modules[cls.__module__]], dict[str, str]()
    while todo:
        module = todo.pop()
        if module.__name__ in seen:
            continue
        tree = ast.parse(inspect.getsource(module))
        seen[module.__name__] = _without_words(tree)
        for node in ast.walk(tree):
            name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if re.search(r"\._(?!base$)\w+$", name) and isinstance(found := sys.modules.get(name), ModuleType):
                todo.append(found)
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]


def _without_words(tree: ast.Module) -> str:
    """The syntax without docstrings and comments, and without what only a list of compressors shows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            node.body = [one for one in node.body if not _said(one)]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "knob":
            node.keywords = [k for k in node.keywords if k.arg not in SHOWN]
    return ast.dump(tree)


def _said(node: ast.stmt) -> bool:
    """A label that nothing is computed from, or an import: it says where a thing lies, not what it does."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in LABELS
