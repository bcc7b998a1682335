"""Tests the check of `tests/joins.py`: plans depend on the seed alone, and lost training is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import workbench
from tests import joins
from tests.bench import joins_page
from tests.unit import synthetic
from workbench.cluster.run.errors import none_holds
from workbench.host.elastic.settling import say_why_not


def test_a_plan_depends_on_its_seed_alone_and_half_of_the_rounds_are_busy() -> None:
    plans = [joins.plan_round(seed) for seed in range(300)]
    assert plans == [joins.plan_round(seed) for seed in range(300)]
    assert sum(plan.busy for plan in plans) == 150
    assert {plan.setting for plan in plans} == {joins.name_setting(*one) for one in joins.SETTINGS}
    single = {kinds[0] for plan in plans if len(kinds := plan.kinds) == 1}
    assert single == set(joins.KINDS) - {"two"} and any(len(plan.kinds) == 2 for plan in plans)
    assert all(0 <= plan.gap <= joins.TOGETHER for plan in plans)


def test_a_loss_outside_of_the_reference_is_found_and_one_inside_is_not() -> None:
    reference: dict[str, list[float]] = {}
    run = synthetic.run(ranks=2, steps=60, changes=())
    joins.widen(reference, run)
    windows = list(joins.list_windows(run))
    assert len(windows) == 2 * (60 - joins.WINDOW + 1) and joins.find_outliers(reference, windows) == ([], [])
    highest = max(high for _, high in reference.values())
    for mean, sides in ((highest + 0.1, (1, 0)), (float("nan"), (1, 0)), (-1e9, (0, 1))):
        above, below = joins.find_outliers(reference, [(30, mean)])
        assert (len(above), len(below)) == sides
    assert len(list(joins.list_windows(run, after=1e9))) == 0


def test_the_pages_sentences_are_those_of_the_code() -> None:
    errors = {0: {"type": "EngineDied", "text": "killed"}}
    none_holds(errors, [0], [2], "")
    marks: list[dict[str, Any]] = []
    say_why_not(lambda name, detail: marks.append(detail), "why")
    engine = Path(workbench.__file__).parent / "engine"
    code = "".join([errors[0]["text"], marks[0]["text"], *(path.read_text() for path in engine.rglob("*.py"))])
    page = joins_page.describe({})
    for sentence in (*joins.ENDINGS, *joins.REFUSALS):
        assert sentence in code and sentence in page
    assert joins.is_documented(None, [marks[0]["text"]]) and not joins.is_documented(None, ["killed"])
