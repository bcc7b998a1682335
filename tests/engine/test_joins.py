"""Plays ten seeded rounds of the join campaign, seven of them in CI, against the campaign's measured references."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import joins
from tests.labs import apart

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
IN_CI, OTHERS = (0, 3, 7, 26, 30, 275, 47), (4, 8, 2)
SEEDS = (*IN_CI, *OTHERS)
KEPT = json.loads((Path(__file__).parents[2] / "docs/data/joins.json").read_text())
REFERENCES = {seed: found for seed in SEEDS if (found := joins.find_reference(KEPT, joins.plan_round(seed)))}


def test_the_seeds_cover_both_ways_to_join_and_most_kinds_of_fault() -> None:
    plans = [joins.plan_round(seed) for seed in SEEDS]
    assert set(REFERENCES) == set(SEEDS)
    assert {plan.how for plan in plans} == {"resize", "replace"}
    assert len({plan.setting for plan in plans}) >= 7
    kinds = {kind for plan in plans for kind in plan.kinds}
    assert len(kinds) >= 5
    in_ci = [joins.plan_round(seed) for seed in IN_CI]
    assert {plan.how for plan in in_ci} == {"resize", "replace"}
    assert {kind for plan in in_ci for kind in plan.kinds} == kinds


@pytest.mark.parametrize("seeds", [IN_CI, pytest.param(OTHERS, marks=pytest.mark.every)], ids=["in CI", "others"])
def test_survivors_of_faults_in_joins_train_on(
    seeds: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with apart(tmp_path_factory):
        rounds = [joins.play(seed, REFERENCES[seed], print) for seed in seeds]
    assert [one for one in rounds if one["outcome"] == "wrong"] == []
    late = [one["seed"] for one in rounds if one["outcome"] == "too late"]
    most = max(1, 3 * len(seeds) // 10)
    assert len(late) <= most, f"the faults of seeds {late} came after the last step: they test no join"
