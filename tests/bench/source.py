"""Hashes a member's code without its prose, so that members with equal hashes do the same."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
from functools import cache
from types import ModuleType

# These labels serve lists of members, the laws and switches; they do not affect a cell.
LABELS = ("kinds", "kind", "starter", "plain", "own", "drops", "formerly_called", "skips", "follows")
SHOWN = ("doc", "unit", "log")  # of a knob: only for people


@cache
def code(cls: type) -> str:
    """Returns a hash of a strategy's file and of the private family files that it imports, without their prose."""
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
    """Returns the syntax without docstrings, comments, and labels for lists of compressors."""
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
    """Whether it is an import or a label that no computation uses."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in LABELS
