"""The benchmark pages: each section is on one page, and each page begins with its results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.bench import page as tables
from tests.bench import pages

FOLDER = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages.write_pages(FOLDER / "data")


def test_pages_are_written_from_the_raw_samples(written: dict[str, str]) -> None:
    there = {f"benchmarks/{path.name}" for path in (FOLDER / "project" / "benchmarks").glob("*.md")}
    assert there | {"benchmarks.md", "prediction.md"} == set(written)
    for name, text in written.items():
        assert (FOLDER / "project" / name).read_text() == text, "run: python -m tests.bench --page-only"


def test_each_measurement_is_on_one_page() -> None:
    assert Counter(name for page in pages.PAGES.values() for name in page.headings) == Counter(list(tables.SECTIONS))


def test_a_page_begins_with_question_result_and_machine_in_at_most_five_lines(written: dict[str, str]) -> None:
    every = {f"benchmarks/{key}.md": page for key, page in pages.PAGES.items()}
    for key, page in {**every, "prediction.md": pages.PREDICTION}.items():
        summary = written[key].partition("\n## ")[0].splitlines()[2:]
        lines = [line for line in summary if line]
        assert 3 <= len(lines) <= 5 and lines[0] == page.question and "cores" in lines[-1], key


def test_pages_without_samples_name_the_commands(tmp_path: Path) -> None:
    for key, page in pages.PAGES.items():
        text = pages.write_pages(tmp_path)[f"benchmarks/{key}.md"]
        assert [f"python -m tests.bench {name}" in text for name in page.headings] == [True] * len(page.headings)
