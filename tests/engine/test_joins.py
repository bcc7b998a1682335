"""Plays ten seeded rounds of the join campaign against the references that the campaign measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import joins
from tests.labs import apart

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
SEEDS = (0, 3, 4, 7, 8, 26, 30, 275, 2, 47)
KEPT = json.loads((Path(__file__).parents[2] / "docs/data/joins.json").read_text())
REFERENCES = {seed: found for seed in SEEDS if (found := joins.find_reference(KEPT, joins.plan_round(seed)))}


def test_the_seeds_cover_both_ways_to_join_and_most_kinds_of_fault() -> None:
    plans = [joins.plan_round(seed) for seed in SEEDS]
    assert set(REFERENCES) == set(SEEDS)
    assert {plan.how for plan in plans} == {"resize", "replace"}
    assert len({plan.setting for plan in plans}) >= 7
    assert len({kind for plan in plans for kind in plan.kinds}) >= 5


def test_survivors_of_ten_faults_in_joins_train_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    with apart(tmp_path_factory):
        rounds = [joins.play(seed, REFERENCES[seed], print) for seed in SEEDS]
    assert [one for one in rounds if one["outcome"] == "wrong"] == []
    late = [one["seed"] for one in rounds if one["outcome"] == "too late"]
    assert len(late) <= 3, f"the faults of seeds {late} came after the last step: they test no join"
