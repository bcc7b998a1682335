"""Checks that pages and notebooks are in plain English: few markers, short sentences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import links, prose

MOST = prose.Figures(words=0, markers=3.0, mean=18.0, long=10.0)
SHORT = 150  # words; a shorter page counts only towards all pages
BAD = {
    "a clause without a noun": "The view depends on what is known of a step.",
    "a sentence that begins with a clause": "What a rank sends counts once.",
    "of which, of whom": "The model has layers, of which two are frozen.",
    "an ornament": "A rank seldom waits for the kernel.",
    "a passive of saying": "The rank is told about the change.",
    "for: write because": "The rank waits, for the link is slow.",
    "a pronoun without a noun": "Rank 0 waits for the others.",
    "a share in words": "It takes a tenth of the step.",
    "to the bit": "The two runs agree to the bit.",
    "a figurative verb": "The ranks go apart after a step.",
    "a subject of no and none": "The run costs no more than before.",
    "is there, can be had": "A checkpoint is there after the run.",
}
PLAIN = "A rank waits for the slow link. Then it sends its gradients to the other ranks."


def name(path: Path) -> str:
    return path.relative_to(links.ROOT).as_posix()


def above(text: list[str]) -> list[str]:
    """Returns the bounds that the text exceeds, with what it has."""
    pairs = zip(MOST._fields, prose.measure(text), MOST, strict=True)
    return [f"{field}: {got:.1f}, at most {most}" for field, got, most in pairs if most and got > most]


@pytest.mark.parametrize("page", prose.pages(), ids=name)
def test_a_page_is_in_plain_english(page: Path) -> None:
    text = prose.sentences(page)
    if prose.measure(text).words >= SHORT:
        assert above(text) == [], f"python -m tests.prose {name(page)} quotes the sentences"


def test_all_pages_together_are_in_plain_english() -> None:
    assert above([sentence for page in prose.pages() for sentence in prose.sentences(page)]) == []


@pytest.mark.parametrize("page", prose.notebooks(), ids=name)
def test_a_notebook_has_few_markers(page: Path) -> None:
    got = prose.measure(prose.sentences(page))
    assert got.markers <= MOST.markers, f"python -m tests.prose {name(page)} quotes the sentences"


@pytest.mark.parametrize("kind", prose.MARKERS)
def test_the_measure_finds_a_marker_of_each_kind(kind: str) -> None:
    (bad,) = [sentence for start, sentence in BAD.items() if kind.startswith(start)]
    assert [why for _, why in prose.markers(bad)] == [kind]
    assert above([bad] * 5) and above([PLAIN]) == []


def test_the_measure_finds_long_sentences(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(" ".join(f"{PLAIN[:-1]}, and so on{' and on' * 10}." for _ in range(3)))
    assert [bound.split(":")[0] for bound in above(prose.sentences(page))] == ["mean", "long"]


def test_the_measure_reads_only_prose(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(
        f"# What it is\n\n| the others | a |\n\n```\nthe others and the others\n```\n\n{PLAIN}\n\n"
        "1. Call `rank.wait(handle)` before the [next step](anew.md)."
    )
    cells = [("markdown", page.read_text()), ("code", "# seldom")]
    (notebook := tmp_path / "page.ipynb").write_text(
        json.dumps({"cells": [{"cell_type": kind, "source": [source]} for kind, source in cells]})
    )
    first, second = PLAIN.split(" Then ")
    assert prose.sentences(page) == [first, f"Then {second}", "Call CODE before the next step."]
    assert prose.sentences(notebook) == prose.sentences(page)


def test_the_command_quotes_a_marker_and_its_kind(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(f"{PLAIN} {BAD['an ornament']}")
    command = [sys.executable, "-m", "tests.prose", str(page)]
    said = subprocess.run(command, cwd=links.ROOT, capture_output=True, text=True, check=True).stdout
    assert "1 markers" not in said and f"{BAD['an ornament']}\n    'seldom': an ornament" in said
