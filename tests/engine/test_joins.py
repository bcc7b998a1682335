"""Ten rounds of the join campaign by fixed seed, against the references that the campaign has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import joins
from tests.labs import apart

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(400)]
SEEDS = (0, 4, 7, 8, 14, 17, 18, 24, 30, 43)
REFERENCES = json.loads((Path(__file__).parents[2] / "docs/data/joins.json").read_text())["references"]


def test_the_seeds_cover_each_way_to_join_and_most_kinds_of_fault() -> None:
    plans = [joins.plan_round(seed) for seed in SEEDS]
    assert {plan.how for plan in plans} == {"resize", "replace"}
    assert len({plan.setting for plan in plans}) >= 7
    assert len({kind for plan in plans for kind in plan.kinds}) >= 5


@pytest.mark.parametrize("seed", SEEDS)
def test_survivors_of_a_fault_in_a_join_train_on(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    with apart(tmp_path_factory):
        found: dict[str, Any] = joins.play(seed, REFERENCES[joins.plan_round(seed).setting], print)
    assert found["outcome"] in ("went on", "ended"), found["why"]
