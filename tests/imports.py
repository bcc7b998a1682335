"""Reads the imports of the package's source files without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for package in ("workbench", "widgets") for p in (ROOT / package).rglob("*.py"))


class Import(NamedTuple):
    """One imported name. name: dotted, with the attribute; alias: its name in the file; typing: for type checkers."""

    name: str
    alias: str
    typing: bool


def module(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def list_imports(path: Path) -> Iterator[Import]:
    """Yields every import of a file, at any place."""
    todo: list[tuple[ast.AST, bool]] = [(parse(path), False)]
    while todo:
        node, typing = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += [(child, True) for child in node.body] + [(child, typing) for child in node.orelse]
        elif isinstance(node, ast.Import):
            yield from (Import(a.name, a.asname or a.name, typing) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield from (Import(f"{node.module}.{a.name}", a.asname or a.name, typing) for a in node.names)
        else:
            todo += [(child, typing) for child in ast.iter_child_nodes(node)]


MODULES = {module(p): p for p in SOURCES}
PACKAGES = {module(p) for p in SOURCES if p.name == "__init__.py"}


def find_module(name: str) -> str:
    """The module of an imported name: itself, or the one that defines the attribute."""
    return name if name in MODULES else name.rpartition(".")[0]


@cache
def graph(typing: bool) -> dict[str, set[str]]:
    """By module the modules that it imports, packages left out; typing: count imports for type checkers, too."""
    return {
        name: {m for one in list_imports(path) if typing or not one.typing
               if (m := find_module(one.name)) in MODULES and m not in PACKAGES | {name}}
        for name, path in MODULES.items() if name not in PACKAGES
    }  # fmt: skip


def reach(name: str, edges: dict[str, set[str]]) -> set[str]:
    """All modules that `name` imports, directly or through others."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        new = edges[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def used_attributes(path: Path, alias: str) -> set[str]:
    """The attributes that a file reads of the module that it calls `alias`."""
    return {n.attr for n in ast.walk(parse(path))
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == alias}  # fmt: skip
