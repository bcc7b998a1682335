"""Tests that `lab.tune` and `run.advice` rank the same settings alike."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.ranks import experiment
from tests.unit.virtual_ranks import VirtualRanks
from workbench.compressors import Cast, Dense
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.run import simulate
from workbench.sim import Costs
from workbench.sim.costs.durations import Duration
from workbench.sim.plan import advice as advising
from workbench.sim.plan.evidence import Evidence, is_usable, sort_by_evidence
from workbench.sim.plan.trials import Interval
from workbench.sim.plan.what_if import RunPredictor
from workbench.sim.tune.live_search import Tuning
from workbench.strategies import DDP, LocalSGD

PATIENT = 600.0  # seconds, on a machine that is busy with other things
COSTS = Costs(forward=Duration(0.001), backward=Duration(0.002), update=0.0002)
E = experiment(2, 60)
FAR = E.set("fabric", Fabric(link=Link(bandwidth=1000, latency=5.0)))
SPACE: list[dict[str, Any]] = [{"bucket_mb": 0.02}, {"bucket_mb": 0.04}, {"compressor": Cast()},
                               {"strategy": LocalSGD(every=4)}, {"strategy.accumulate": 2}]  # fmt: skip


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.sim.tune.trial_runner.POLL_SECONDS", 0.0)


def tuned(e: Experiment, candidates: list[dict[str, Any]], drop: float) -> list[dict[str, Any]]:
    """Returns the candidates that `Tuning` may use, best first. drop: how far a setting's loss lies below the trend."""
    found, noise = [], Random(2)

    def loss(step: int, now: Experiment) -> float:
        return 4.0 - 0.3 * float(np.log(4 * step + 1)) - drop * (now != e) + noise.gauss(0.0, 0.01 if drop else 3.0)

    for settings in candidates:
        space = {path: [value] for path, value in settings.items()}
        trials = Tuning(VirtualRanks(e, COSTS, loss=loss), space, costs=COSTS, trials=2).start().wait(PATIENT).trials
        found.append((settings, trials[-1]))
    order = sort_by_evidence(found, lambda one: Evidence(one[1].seconds or np.inf, one[1].fit))
    return [settings for settings, trial in order if trial.fit]


def test_tune_and_advice_rank_the_same_evidence_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss differs from its noise, so both use only settings that do not change learning. Advice knows no losses."""
    monkeypatch.setattr(advising, "_list_candidates", lambda *_: iter(SPACE))
    asked = RunPredictor(simulate(replace(FAR, steps=60), costs=COSTS))
    suggestions = [advising._make_suggestion(asked, settings) for settings in SPACE]
    usable = sort_by_evidence((s for s in suggestions if not s.learns), lambda s: Evidence(1 - s.faster, True))
    assert tuned(FAR, SPACE, 0.0) == [s.settings for s in usable] and len(usable) == 2
    best = advising._best_suggestions(asked, "network")
    assert [s.learns for s in best] == [False, True] and best[0].settings == usable[0].settings


@pytest.mark.parametrize(("before", "settings", "alike"), [
    (E, {"bucket_mb": 0.02}, True),
    (E, {"compressor": Cast()}, False),
    (E, {"strategy": LocalSGD(every=8)}, False),
    (E, {"strategy.accumulate": 2}, False),
    (E.set("compressor", Cast()), {"compressor": Dense()}, True),
    (E.set("strategy", LocalSGD(every=4)), {"strategy": DDP()}, False),
], ids=lambda value: "" if isinstance(value, Experiment) else str(value))  # fmt: skip
def test_advice_and_tune_agree_on_settings_that_learn_the_same(
    before: Experiment, settings: dict[str, Any], alike: bool
) -> None:
    asked = RunPredictor(simulate(replace(before, steps=30), costs=COSTS))
    assert advising._make_suggestion(asked, settings).learns is not alike
    assert (tuned(before, [settings], 0.0) == [settings]) is alike, "its loss cannot be told from noise"
    assert tuned(before, [settings], 1.0) == [settings], "its loss lies below the trend"


@pytest.mark.parametrize(("alike", "loss", "usable"), [
    (True, None, True), (False, None, False), (True, Interval(0.1, 0.2, 0.3), True),
    (False, Interval(-0.1, 0.0, 0.019), True), (False, Interval(-0.1, 0.0, 0.021), False),
])  # fmt: skip
def test_a_setting_is_usable_if_its_loss_is_known_to_keep_to_the_trend(
    alike: bool, loss: Interval | None, usable: bool
) -> None:
    assert is_usable(alike, loss, 0.02) is usable


def test_usable_settings_come_first_and_then_fast_ones() -> None:
    found = {"a": Evidence(1.0, False), "b": Evidence(3.0, True), "c": Evidence(2.0, True), "d": Evidence(0.5, False)}
    assert sort_by_evidence(found, found.__getitem__) == ["c", "b", "d", "a"]
