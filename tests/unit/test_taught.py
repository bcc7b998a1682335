"""Tests the lesson on one member: its docstring, its source, and its run next to the usual one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import unescape
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests import reference
from widgets.lesson import lesson
from workbench.compressors import ErrorFeedback
from workbench.fabric import Slow
from workbench.settings import KnobError, knobs
from workbench.settings.parsed_docstring import parse_docstring, source
from workbench.sim.teach.member_comparison import compare_member, list_places
from workbench.strategies import LocalSGD, TorchDDP

EVERY = {m.__name__: m for place in list_places() for m in reference.shipped(place.family)}
USUAL = ("DDP", "Dense", "Whole", "GPipe", "Native", "SGD", "ByHand")  # the members that others are compared with


def text(widget: Any) -> str:
    """Returns the text of the widget's HTML without tags."""
    return unescape(re.sub(r"<[^>]+>", " ", " ".join(c.value for c in widget.children if hasattr(c, "value"))))


def boards(widget: Any) -> int:
    """Returns the number of runs that it shows."""
    return [type(c).__name__ for c in widget.children].count("Board")


@pytest.mark.parametrize("name", EVERY)
def test_a_docstring_is_parsed_without_losing_a_word(name: str) -> None:
    said = parse_docstring(EVERY[name])
    assert said.what and said.when
    words = " ".join([said.what, said.formula, said.when, said.paper, *said.rest]).split()
    whole = (EVERY[name].__doc__ or "").replace("When to use it:", "").replace("Reference:", "").split()
    assert sorted(words) == sorted(whole)
    code = source(EVERY[name])
    assert f"class {name}(" in code and said.what.split("\n")[0] not in code
    own = [k.name for k in knobs(EVERY[name]) if k.name in vars(EVERY[name]).get("__annotations__", ())]
    assert all(f"    {knob}: " in code for knob in own)


def test_a_lesson_has_algorithm_source_both_timelines_knobs_and_paper() -> None:
    shown = lesson(LocalSGD)
    said = text(shown)
    assert boards(shown) == 2
    for words in ("params_i <- optimizer_i(params_i, grad_i)", "async def step(self, rank: Rank, state: Any)",
                  "strategy = DDP(accumulate=1) : ", "strategy = LocalSGD(every=8, momentum=keep) : ",
                  "steps each rank trains alone between averagings", "Local SGD Converges Fast"):  # fmt: skip
        assert words in said, words
    step = [float(ms) for ms in re.findall(r"(\d+) ms per step", said)]
    assert step[1] < step[0], "eight times fewer bytes on a slow wire"


def test_a_lesson_explains_why_the_simulator_cannot_run_a_member() -> None:
    shown = lesson("TorchDDP")
    assert boards(shown) == 0
    assert "only torch itself can run its exchange" in text(shown) and TorchDDP.__name__ in text(shown)


def test_a_fault_is_compared_with_no_fault() -> None:
    assert "fabric.faults = none" in text(lesson(Slow))


@pytest.mark.parametrize(
    ("asked", "words"), [("LocalSDG", "did you mean LocalSGD"), (3, "take a class such as"), (int, "take a class")]
)
def test_an_unknown_member_raises_knob_error(asked: Any, words: str) -> None:
    with pytest.raises(KnobError, match=words):
        lesson(asked)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name, m in EVERY.items() if not getattr(m, "opaque", False)])
def test_every_member_is_simulated_next_to_its_usual_alternative(name: str) -> None:
    pair = compare_member(EVERY[name])
    assert pair.usual.experiment != pair.shown.experiment or name in USUAL
    assert name in repr(pair.shown.experiment) and pair.usual.state == pair.shown.state == "done"
    assert len(lesson(EVERY[name]).children) == 7


def test_a_class_from_a_notebooks_cell_has_a_source() -> None:
    cell = """
class Other:
    def step(self):
        pass

@dataclass(frozen=True, kw_only=True)
class Mine(LocalSGD):
    \"\"\"Of a cell.\"\"\"

    more: int = 2

    async def step(self, rank, state):
        await rank.forward()
"""
    shell = InteractiveShell()
    shell.user_ns |= {"dataclass": dataclass, "LocalSGD": LocalSGD}
    shell.run_cell(cell).raise_error()
    mine = source(shell.user_ns["Mine"])
    assert mine.startswith("@dataclass(frozen=True, kw_only=True)\nclass Mine(LocalSGD):\n    more: int = 2")
    assert mine.endswith("await rank.forward()") and "Other" not in mine
    assert source(type("Made", (LocalSGD,), {})) == ""


def test_a_wrapper_is_shown_around_a_lossy_compressor() -> None:
    """Around Dense, error feedback has no error."""
    found = compare_member(ErrorFeedback)
    all_of_it, some = (run.timeline.spans.rows().nbytes.sum() for run in (found.usual, found.shown))
    assert some < all_of_it / 5
