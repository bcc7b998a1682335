"""Tests the planted mistakes: each has one place in the code and its tests, and reports are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutants import (
    EQUIVALENT,
    KILLED,
    ROOT,
    SURVIVED,
    WRONG,
    Copy,
    Tried,
    chosen,
    find_idle_words,
    judged,
    planted,
)
from tests.mutations import MUTANTS, Mutant


def test_there_are_at_least_forty_mistakes_with_unique_names() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 40
    page = (ROOT / "docs" / "project" / "tests.md").read_text()
    assert f"Of {len(MUTANTS)} mistakes" in page, "docs/project/tests.md: another number; try them and write the result"
    assert chosen(["dabmd", "WAVELET"]) == [m for m in MUTANTS if m.name.startswith(("DABMD", "Wavelet"))]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mistake_has_one_place_and_leaves_a_file_that_python_reads(mutant: Mutant) -> None:
    text = (ROOT / "workbench" / mutant.file).read_text()
    assert ast.dump(ast.parse(planted(text, mutant))) != ast.dump(ast.parse(text))
    with pytest.raises(ValueError, match=r"its text is 0 times in .*, and has to be once"):
        planted("", mutant)


@pytest.mark.parametrize("tests", sorted({m.tests for m in MUTANTS}), ids=lambda tests: tests[0])
def test_the_tests_that_must_notice_a_mistake_exist(tests: tuple[str, ...]) -> None:
    for test in tests:
        file, _, name = test.partition("::")
        if file.endswith(".py"):
            assert re.search(rf"^def {name or 'test_'}", (ROOT / file).read_text(), re.MULTILINE), test


@pytest.mark.parametrize("tests", sorted({m.tests for m in MUTANTS if "-k" in m.tests}), ids=lambda tests: tests[-1])
def test_each_word_that_chooses_tests_selects_one(tests: tuple[str, ...]) -> None:
    assert not find_idle_words(tests)


def test_a_word_that_selects_no_test_is_found(tmp_path: Path) -> None:
    text = "@mark.parametrize('kind', ['AdamW'])\ndef test_one(): word = 'idle'\ndef helper_of_two(): pass\n"
    (tmp_path / "test_it.py").write_text(text)
    assert find_idle_words(("test_it.py", "-k", "one and not adamw or idle or two"), tmp_path) == ["idle", "two"]


def small(folder: Path, test: str) -> Copy:
    """Returns a copy of a package with one function and a test of it."""
    parts = {"workbench/__init__.py": "", "workbench/less.py": "def less(a, b):\n    return a < b\n",
             "tests/test_less.py": test}  # fmt: skip
    for path, text in parts.items():
        (folder / "of" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "of" / path).write_text(text)
    return Copy(folder / "copy", folder / "of", ("workbench", "tests"))


TEST = """
import time
from workbench.less import less

def test_less():
    assert less(1, 2)
    assert less(2, 1) is False or time.sleep(60)
"""


@pytest.mark.parametrize(("now", "limit", "what"), [
    ("a <= b", 30.0, SURVIVED), ("b < a", 30.0, KILLED), ("a < 9", 1.5, KILLED), ("a <", 30.0, WRONG),
])  # fmt: skip
def test_a_mistake_is_judged_by_its_tests(now: str, limit: float, what: str, tmp_path: Path) -> None:
    copy = small(tmp_path, TEST)
    mutant = Mutant("less", "less.py", "a < b", now, ("tests/test_less.py",), "off by one")
    with copy.mistaken(mutant):
        found = judged(mutant, copy.run(mutant.tests, limit))
    assert found.what == what, found
    if now != "a <":
        same = mutant._replace(equivalent="nobody compares what is equal")
        code = 1 if what == KILLED else 0
        assert judged(same, Tried(code, "", 1.0)).what == (WRONG if what == KILLED else EQUIVALENT)
    assert (copy.folder / "workbench/less.py").read_text() == (tmp_path / "of/workbench/less.py").read_text()
