"""The arrows between packages, and the rules of the house that can be read off the source without running it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for package in ("workbench", "widgets") for p in (ROOT / package).rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# (what imports, what it may not import, except from here)
FORBIDDEN = [
    ("widgets", "workbench.engine", ""),
    ("widgets", "workbench.sim", ""),
    ("widgets", "workbench.cluster", ""),
    ("widgets", "workbench.strategies", ""),
    ("widgets", "torch", ""),
    ("workbench", "widgets", ""),
    ("workbench", "ipyparallel", "workbench.cluster"),
    ("widgets", "ipyparallel", ""),
    ("workbench", "torch.distributed", "workbench.engine"),
    ("workbench", "ipywidgets", ""),
    ("workbench", "plotly", ""),
    ("workbench", "anywidget", ""),
    ("workbench.sim", "workbench.engine", ""),
    ("workbench.engine", "workbench.sim", ""),
    ("workbench.engine", "workbench.cluster", ""),
    ("workbench.engine", "workbench.lab", ""),
    ("workbench.cluster", "workbench.lab", ""),
    ("workbench.strategies", "workbench.engine", ""),
    ("workbench.strategies", "workbench.compressors", ""),
    ("workbench.compressors", "workbench.strategies", ""),
    ("workbench.compressors", "workbench.engine", ""),
    ("workbench.optimizers", "workbench.strategies", ""),
    ("workbench.optimizers", "workbench.compressors", ""),
    ("workbench.optimizers", "workbench.tasks", ""),
    ("workbench.optimizers", "workbench.engine", ""),
    ("workbench.strategies", "workbench.optimizers", ""),
    ("workbench.fabric", "torch", ""),
    ("workbench.tasks", "workbench.engine", ""),
    ("workbench.knobs", "torch", ""),
    ("workbench.timeline", "workbench", ""),
]
NO_TORCH = [
    "workbench", "workbench.run", "workbench.analysis", "workbench.export", "workbench.timeline", "workbench.store",
    "workbench.cli",
]  # fmt: skip


def module(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports when it runs, wherever in it; imports for type checkers alone do not count."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            todo += ast.iter_child_nodes(node)


IMPORTS = {module(p): sorted(set(imports(p))) for p in SOURCES}


@pytest.mark.parametrize(("who", "what", "but"), FORBIDDEN, ids=lambda x: x or "everywhere")
def test_nobody_imports_against_the_arrows(who: str, what: str, but: str) -> None:
    against = [
        f"{name} imports {found}"
        for name, every in IMPORTS.items()
        if within(name, who) and not (but and within(name, but))
        for found in every
        if within(found, what)
    ]
    assert not against


def test_ipython_belongs_to_the_widgets_and_to_lab_where_it_asks_for_its_kernel() -> None:
    allowed = {"widgets", "workbench.cluster"}
    who = {name for name, every in IMPORTS.items() for found in every if within(found, "IPython")}
    assert not [name for name in who if not any(within(name, a) for a in allowed)]


def test_these_arrows_are_about_packages_that_exist() -> None:
    every = [*IMPORTS, "torch", "torch.distributed", "ipyparallel", "ipywidgets", "plotly", "anywidget"]
    for who, what, but in FORBIDDEN:
        assert all(any(within(name, x) for name in every) for x in (who, what, but) if x), (who, what, but)


@pytest.mark.parametrize("name", NO_TORCH)
def test_a_recorded_run_opens_without_torch(name: str) -> None:
    code = f"import sys; import {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "no module docstring"


def public(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_every_public_class_says_what_it_is(path: Path) -> None:
    classes = [n for n in public(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
    assert not [n.name for n in classes if not ast.get_docstring(n)]


REFUSED = set("Manager Trainer Node Worker Callback Hook Registry Context Helper Utils Handler Config".split())


def test_no_class_is_called_by_a_refused_noun() -> None:
    found = [
        f"{module(p)}.{n.name}"
        for p in SOURCES
        for n in public(ast.parse(p.read_text()))
        if isinstance(n, ast.ClassDef) and any(n.name.endswith(noun) for noun in REFUSED)
    ]
    assert not found


@pytest.mark.parametrize("path", TESTS, ids=lambda p: p.stem)
def test_no_test_asserts_nothing(path: Path) -> None:
    every = ast.walk(ast.parse(path.read_text()))
    functions = {node.name: ast.unparse(node) for node in every if isinstance(node, ast.FunctionDef)}
    claims = ["assert ", "assert_", "raises(", "expect("]
    claims += [f"{name}(" for name, words in functions.items() if "assert " in words and not name.startswith("test_")]
    for name, words in functions.items():
        if name.startswith("test_"):
            assert any(claim in words for claim in claims), f"{name} asserts nothing"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_stripped(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    full = [n for n, cell in enumerate(cells) if cell.get("outputs") or cell.get("execution_count")]
    assert not full, f"cells {full} of {path.name} hold outputs"
