"""The functions that docs/project/one_step.md and docs/project/flows/ name exist, and run in that order."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ended, experiment, live
from tests.unit.test_resizing import Crowd, setting
from workbench.strategies import DDP

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "docs" / "project"
PAGES = [PROJECT / "one_step.md", *sorted((PROJECT / "flows").glob("*.md"))]
PLACE = re.compile(r"`([\w/]+\.py): (\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_flow_is_short_enough_to_be_read(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 60 and len(PLACE.findall(page.read_text())) > 10


@pytest.mark.parametrize(
    ("file", "name"), sorted({place for page in PAGES for place in PLACE.findall(page.read_text())})
)
def test_every_place_of_a_flow_is_in_the_code(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


class Calls:
    """The functions that threads call, in the order of their first calls; threads that began before do not count."""

    def __init__(self) -> None:
        self.first: dict[Any, None] = {}

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self.first.setdefault(frame.f_code)

    def order(self) -> list[tuple[str, str]]:
        return [("workbench/" + code.co_filename.rpartition("workbench/")[2], code.co_name) for code in self.first]


def list_entries(page: str, heading: str) -> list[list[tuple[str, str]]]:
    """The places of each numbered entry below a heading of a page."""
    text = (PROJECT / "flows" / page).read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [PLACE.findall(entry) for entry in re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]]


def check_order(calls: Calls, entries: list[list[tuple[str, str]]], without: set[str]) -> None:
    """All places but `without` were called, and no entry began before the entry above it."""
    order = calls.order()
    wanted = [[place for place in entry if place[1] not in without] for entry in entries]
    assert {place for entry in wanted for place in entry} - set(order) == set()
    begins = [min(order.index(place) for place in entry) for entry in wanted if entry]
    assert begins == sorted(begins), [[(order.index(p), p) for p in entry] for entry in wanted]


def watch(act: Callable[[Calls], object]) -> Calls:
    with Calls() as calls:
        act(calls)
    return calls


@pytest.mark.ranks
def test_ranks_outlive_a_death_in_the_order_of_the_page() -> None:
    def lose_one(calls: Calls) -> None:
        with Crowd(setting(DDP(), ranks=3, on_death="go on", eval_every=0)) as crowd:
            crowd.reach(3)
            calls.first.clear()
            crowd.every[2].abort(asked=True)
            crowd.until(lambda: len(crowd.there) == 2 and all(len(s.members) == 2 for s in crowd.there))
            crowd.reach(crowd.first.rank.step + 2)

    parts = ("The ranks that are left", "The next generation")
    entries = [entry for part in parts for entry in list_entries("rank_loss.md", part)]
    check_order(watch(lose_one), entries, {"run_generations", "find_sources", "mark_end_reason", "undo_forming"})


@pytest.mark.ranks
def test_a_checkpoint_is_written_in_the_order_of_the_page(tmp_path: Path) -> None:
    written = watch(lambda _: ended(live(experiment(2, 6, save_every=4), run_dir=tmp_path)))
    check_order(written, list_entries("checkpoint.md", "Written"), set())
