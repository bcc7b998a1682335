"""Runs the code of README, docs/start/ and docs/explain/, and checks their limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import workbench
from tests import pictures
from workbench import Experiment, KnobError

ROOT = Path(__file__).parents[2]
EXPLAIN = sorted((ROOT / "docs" / "explain").glob("*.md"))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def test_the_readme_fits_into_five_thousand_bytes() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 5000


def test_the_quickstart_shows_the_readmes_program_and_output() -> None:
    readme, quickstart = (ROOT / "README.md"), ROOT / "docs" / "start" / "quickstart.md"
    (program,) = python_blocks(readme)
    assert python_blocks(quickstart)[0] == program and python_blocks(ROOT / "docs" / "index.md") == [program]
    shown = re.findall(r"```text\n(.*?)```", readme.read_text(), re.S)
    assert shown and shown[0] in quickstart.read_text()


def test_changes_that_the_quickstart_suggests_are_valid() -> None:
    names = {name: getattr(workbench, name) for name in workbench.__all__}
    calls = re.findall(r"^lab\.set\((.*?)\)  #", python_blocks(ROOT / "docs" / "start" / "quickstart.md")[1], re.M)
    assert len(calls) == 4
    for call in calls:
        assert Experiment().set(*eval(f"({call})", names)) != Experiment()
    with pytest.raises(KnobError):
        Experiment().set("compressor", "PowerSGD2")


def test_the_tour_shows_the_cell_of_its_picture() -> None:
    (block,) = python_blocks(ROOT / "docs" / "start" / "tour.md")
    lines = [line.partition("  #")[0] for line in block.splitlines() if line]
    assert lines == pictures.CELL.splitlines()
    numbers = re.findall(r"^(\d)\. ", (ROOT / "docs" / "start" / "tour.md").read_text(), re.M)
    assert len(numbers) == len(pictures.PICTURES["tour"][1])
    for name in pictures.PICTURES:
        assert (pictures.FOLDER / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_pictures_show_the_present_dashboard() -> None:
    """Scripts, styles or the order of views have changed since if this fails; the pictures show what they look like."""
    assert json.loads(pictures.HASH.read_text())["shown"] == pictures.hash_shown(), "run: make pictures"


def test_the_film_is_short_and_small() -> None:
    with Image.open(pictures.DOCS / "dashboard.gif") as film:
        assert film.n_frames * film.info["duration"] <= 15_000 and film.size == pictures.FILM_SIZE
    assert (pictures.DOCS / "dashboard.gif").stat().st_size < 3_000_000


def test_the_loop_of_the_page_trains_without_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = python_blocks(ROOT / "docs" / "start" / "own_script.md")
    exec(block, {})
    assert float(capsys.readouterr().out.removeprefix("loss ")) < 1


@pytest.mark.parametrize("page", EXPLAIN, ids=lambda page: page.stem)
def test_code_of_an_explanation_runs_and_the_page_is_short(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(page.read_text().split()) <= 600
    for block in python_blocks(page):
        names: dict[str, Any] = {}
        exec(block, names)
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", EXPLAIN, ids=lambda page: page.stem)
def test_functions_that_an_explanation_links_are_in_the_linked_file(page: Path) -> None:
    for names, file in re.findall(r"\[(`[^\]]+`)\]\(([^)]+\.py)\)", page.read_text()):
        text = (page.parent / file).read_text()
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"def {name}\b", text), (name, file)
