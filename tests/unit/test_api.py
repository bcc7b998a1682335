"""Tests the reference of public names: every name has an entry, and Sphinx writes an inventory of them."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import workbench
from tests import api, command_line
from workbench.cli import app

ROOT = Path(__file__).parent.parent.parent
RESULTS = list(api.HOMES)
LISTED = [name for names in api.PAGES.values() for name in names]
ERROR = re.compile(r"(?:Error|Exception|Mismatch|Deadlock|RankRefusal)$")
TINY = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/docs"]
project, extensions, root_doc = "tiny", ["myst_parser", "api"], "lab"
source_suffix = {{".md": "markdown"}}
suppress_warnings = ["myst.xref_missing", "toc.not_included"]
"""


def test_every_public_name_has_an_entry_on_one_page() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference" / "api").glob("*.md"))
    for name in set(workbench.__all__) - set(api.ERRORS["workbench"]):
        kind = "class" if inspect.isclass(getattr(workbench, name)) else "function"
        assert text.count(f".. auto{kind}:: workbench.{name}\n") == 1, name
    assert len(LISTED) == len(set(LISTED)) and set(LISTED) <= set(workbench.__all__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_projects_can_link_to_public_methods(tmp_path: Path) -> None:
    inventory = pytest.importorskip("sphinx.util.inventory")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "conf.py").write_text(TINY.format(root=str(ROOT)))
    for name in ("lab", "functions", "results"):
        (tmp_path / "pages" / f"{name}.md").write_text((ROOT / "docs/reference/api" / f"{name}.md").read_text())
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(tmp_path / "pages"), str(tmp_path / "out")]
    ran = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    with (tmp_path / "out" / "objects.inv").open("rb") as file:
        found = inventory.InventoryFile.load(file, "", lambda base, page: page)
    assert found["py:method"]["workbench.Lab.pause"].uri == "lab.html#workbench.Lab.pause"
    assert {"workbench.Lab.run", "workbench.Lab.set", "workbench.Lab.attach"} <= set(found["py:method"])
    assert {f"workbench.{name}" for name in api.PAGES["functions"]} == set(found["py:function"])
    assert "workbench.Lab.state" in found["py:property"]
    assert "workbench.cluster.run.run_changes.PendingChange.wait" in found["py:method"]


METHODS = [(name, method) for name in [*LISTED, *RESULTS] for method in api.public(name)]


@pytest.mark.parametrize(("name", "method"), METHODS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_docstring_describes_each_parameter_and_each_error(name: str, method: api.Method) -> None:
    owner = api.find(name)
    assert not api.lacks(owner if inspect.isclass(owner) else None, method)
    page = next((page for page, names in api.PAGES.items() if name in names), "results")
    text = (ROOT / "docs" / "reference" / "api" / f"{page}.md").read_text()
    entry = re.search(rf"^## {name}\n.*?(?=^## |\Z)", text, re.S | re.M)
    assert entry and (not inspect.isclass(owner) or f"| `{method.name}" in entry[0])


@pytest.mark.parametrize("name", [name for name in LISTED if inspect.isclass(getattr(workbench, name))])
def test_a_class_describes_each_parameter_of_its_constructor(name: str) -> None:
    assert not api.undescribed(getattr(workbench, name))


def test_each_object_that_a_public_method_returns_has_an_entry() -> None:
    own = re.compile(r"\b[A-Z]\w+\b")
    results = {"Lab", "Run", "Checkpoint", *api.PAGES["functions"], *RESULTS} - {
        "log_to"
    }  # a Sink is a user's function
    asked = [m for name, m in METHODS if name in results]
    returned = {name for m in asked for name in own.findall(str(inspect.signature(m.function).return_annotation))}
    found = {c.__name__ for module in list(sys.modules.values()) if module.__name__.startswith("workbench.")
             for c in vars(module).values() if inspect.isclass(c) and c.__module__.startswith("workbench")}  # fmt: skip
    entries = {*workbench.__all__, *api.HOMES, *(name for names in api.ERRORS.values() for name in names)}
    assert {"PendingChange", "Scaling", "Stacks"} <= returned & found
    assert not (returned & found) - entries


@pytest.mark.parametrize("name", [name for name in RESULTS if hasattr(api.find(name), "_fields")])
def test_a_result_describes_each_of_its_fields(name: str) -> None:
    assert not api.undescribed(api.find(name))


def test_a_missing_description_is_found() -> None:
    class Bad:
        """Holds. number: not in a paragraph of its own."""

        def silent(self) -> None:
            raise ValueError

        def hold(self, number: int, other: int) -> int:
            """Holds a number. Raises KeyError for no number.

            other:  another number
            """
            if number < 0:
                raise KeyError(number)
            raise workbench.KnobError("number=-1")

    Bad.__module__ = "workbench.bad"
    silent, hold = api.methods(Bad)
    assert api.lacks(Bad, silent) == ["a summary", "error ValueError"]
    assert api.lacks(Bad, hold) == ["parameter number", "error KnobError"]


INTERNAL = {  # caught inside the workbench, or turned into another error
    "Aborted", "AuthenticationError", "CoroutineEnded", "Damaged", "LawBroken", "LeaveLoop", "LeftBehind", "LoopEnded",
    "Mismatch", "NoAnswer", "NoSteps", "NotNeeded", "Overruled", "Preempted", "RankNotBegun", "Refused", "ResizeSignal",
    "SearchStopped", "SimulationStopped", "StageDone", "StartTimeout", "TrialBroken", "UnevenSplitError",
    "UnsavableValue", "Unwritable", "_PassAborted", "_UnclearArgument",
}  # fmt: skip


def test_every_error_is_on_the_page_of_errors_or_internal() -> None:
    classes = {
        node.name
        for path in (ROOT / "workbench").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(ERROR.search(ast.unparse(base)) for base in node.bases)
    }
    listed = {name for names in api.ERRORS.values() for name in names}
    assert classes == listed | INTERNAL and not listed & INTERNAL
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for name in listed:
        assert re.search(rf"^## {name}\n\n.*?\n\n\*\*{api.REMEDY}\*\* \S", text, re.S | re.M), name


@pytest.mark.parametrize("name", command_line.commands())
def test_the_page_of_commands_names_what_help_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    help_text = CliRunner().invoke(app, [*name.split(), "--help"]).output
    for p in command_line.parameters(command_line.commands()[name]):
        word = p.name if p.is_argument else p.spelling.partition(",")[0]
        assert word.lower() in help_text.lower(), word
        assert ("no-" in p.spelling) == (f"--no-{p.name}" in help_text)
