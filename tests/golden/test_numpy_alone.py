"""Checks that reference implementations do not use the code that they judge."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
DRIVES = {"driven"}  # runs the workbench


def test_reference_implementations_import_numpy_only() -> None:
    papers = [path for path in HERE.glob("*.py") if not path.name.startswith("test_") and path.stem not in DRIVES]
    assert len(papers) > 7
    apart = {f"tests.golden.{path.stem}" for path in papers}
    for path in papers:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert found <= apart | {"__future__", "collections.abc", "math", "typing", "numpy"}, path.name
