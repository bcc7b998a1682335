"""Tests the check of `tests/joins.py`: plans depend on the seed alone, and lost training is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench
from tests import joins
from tests.bench import joins_page
from tests.unit import synthetic
from workbench.cluster.run.rank_errors import explain_lost_state
from workbench.host.elastic.shrink_plan import mark_end_reason
from workbench.lab import RankError


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
    windows = list(joins.list_windows(run))
    joins.widen(reference, windows)
    assert len(windows) == 2 * (60 - joins.WINDOW + 1) and joins.find_outliers(reference, windows) == ([], [])
    highest = max(high for _, high in reference.values())
    for mean, sides in ((2 * highest, (1, 0)), (float("nan"), (1, 0)), (-1e9, (0, 1))):
        above, below = joins.find_outliers(reference, [(30, mean)])
        assert (len(above), len(below)) == sides
    assert len(list(joins.list_windows(run, after=1e9))) == 0


def test_the_pages_sentences_are_those_of_the_code() -> None:
    errors = {0: {"type": "EngineDied", "text": "killed"}}
    explain_lost_state(errors, [0], [2], "")
    marks: list[dict[str, Any]] = []
    mark_end_reason(lambda name, detail: marks.append(detail), "why")
    engine = Path(workbench.__file__).parent / "engine"
    code = "".join([errors[0]["text"], marks[0]["text"], *(path.read_text() for path in engine.rglob("*.py"))])
    page = joins_page.describe({})
    for sentence in (*joins.ENDINGS, *joins.REFUSALS):
        assert sentence in code and sentence in page
    assert joins.is_documented(None, [marks[0]["text"]]) and not joins.is_documented(None, ["killed"])


class _Join:
    """The data that the judge reads of a join, in which rank 0 was killed."""

    def __init__(self, setting: int, how: str = "resize") -> None:
        strategy, partition = joins.SETTINGS[setting]
        self.plan = joins.Plan(strategy, partition, how, ("old",), 0.0, 0.0, False)
        self.old, self.killed, self.log, self.lab = (0, 1), {0}, ["cut 2 connections"], self
        self.notes: list[str] = []


class _Done:
    state = "done"

    def details(self, kind: str) -> list[tuple[int, float, dict[str, Any]]]:
        return [(60, 2.5, {"members": [1]})]


def test_losses_below_the_reference_are_as_wrong_as_losses_above_it() -> None:
    reference = {"windows": {str(step): [0.2, 0.4] for step in range(120)}}
    margin = 0.2 * joins.MARGIN
    inside, outside = (0.3, 0.201 - margin, 0.399 + margin), (0.199 - margin, 0.401 + margin, float("nan"))
    for mean, outcome in [*((mean, "went on") for mean in inside), *((mean, "wrong") for mean in outside)]:
        judged = joins.judge(_Done(), _Join(0), None, [(60, 0.3), (61, mean)], reference)  # type: ignore[arg-type]
        assert judged["outcome"] == outcome
        sides = (judged.get("below", 0), judged.get("above", 0))
        assert sides == ((0, 0) if outcome == "went on" else (int(mean < 0.2), int(not mean <= 0.4)))


def test_a_run_must_not_end_while_a_survivor_holds_the_full_state_even_after_a_cut() -> None:
    reference = {"windows": {"60": [0.2, 0.4]}}
    error = RankError([{"rank": 0, "step": 60, "op": "", "type": "EngineDied",
                        "text": "no rank that is left holds the trained state"}])  # fmt: skip
    whole = joins.judge(_Done(), _Join(0), error, [], reference)  # type: ignore[arg-type]
    assert whole["outcome"] == "wrong" and "ranks [1] held the full state" in whole["why"]
    assert joins.judge(_Done(), _Join(3), error, [], reference)["outcome"] == "ended"  # type: ignore[arg-type]


def test_parts_share_all_seeds_and_a_round_that_is_played_again_keeps_its_earlier_outcome() -> None:
    parts = [joins.list_seeds(300, part, 3) for part in range(3)]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(300))
    assert all({0, 1} == {seed % 2 for seed in one} for one in parts)
    before = {"seed": 1, "outcome": "wrong", "earlier": [{"seed": 1, "outcome": "ended"}]}
    kept: dict[str, Any] = {"each": [before, {"seed": 2}]}
    joins.put_round(kept, {"seed": 1, "outcome": "went on"})
    earlier = [{"seed": 1, "outcome": "ended"}, {"seed": 1, "outcome": "wrong"}]
    assert kept["each"] == [{"seed": 2}, {"seed": 1, "outcome": "went on", "earlier": earlier}]
    files = [{"references": {"DDP": {way: {}}}, "controls": {way: 1}, "each": [{"seed": seed, "outcome": "wrong"}]}
             for seed, way in ((5, "resize"), (4, "replace"))]  # fmt: skip
    merged = joins.merge(files)
    assert merged["references"] == {"DDP": {"resize": {}, "replace": {}}}
    assert set(merged["controls"]) == {"resize", "replace"}
    assert [one["seed"] for one in merged["each"]] == [4, 5] and merged["summary"] == {"rounds": 2, "wrong": 2}
    with pytest.raises(ValueError, match="the same seed"):
        joins.merge([files[0], files[0]])


def test_a_round_passes_if_a_run_with_as_many_ranks_and_no_fault_has_such_losses_too(monkeypatch: Any) -> None:
    reference = {"windows": {str(step): [0.2, 0.4] for step in range(120)}}
    plan = joins.plan_round(275)
    for twin, outcome in (([0.3], None), ([0.7], "went on"), ([0.01], None), ([0.01, 0.7], "went on")):
        monkeypatch.setattr(joins, "play_twin", lambda *_, means=twin: [(60, mean) for mean in means])
        judged = joins.judge(_Done(), _Join(0), None, [(60, 0.6)], reference)  # type: ignore[arg-type]
        assert judged["outcome"] == "wrong" and judged["sizes"] == [(60, 1)]
        found = joins.compare_with_twin(judged, plan, 275, reference)
        assert found.get("outcome") == outcome and (found["twin"] == "within the range") == (twin == [0.3])
        assert "outcome" not in joins.compare_with_twin({**judged, "state": "failed"}, plan, 275, reference)
