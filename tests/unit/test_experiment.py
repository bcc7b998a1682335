"""Tests experiments: defaults, checks as a whole, JSON, and errors for invalid settings."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from workbench.compressors import Compressor, Dense, ErrorFeedback, TopK
from workbench.experiment import Experiment
from workbench.experiment.recipes import recipe, recipes
from workbench.fabric import Fabric, Link, Slow
from workbench.lab import Lab
from workbench.settings import KnobError, members, walk
from workbench.strategies import LocalSGD, Strategy, TorchDDP
from workbench.tasks import ByteGPT, Digits


def test_an_experiment_takes_the_tasks_rate_and_batch_by_default() -> None:
    filled = Experiment(task=Digits()).checked()
    assert (filled.lr, filled.batch) == (Digits.lr, Digits.batch)
    assert Experiment(lr=0.5, batch=3).checked().lr == 0.5


def test_an_experiment_is_the_same_after_json() -> None:
    fabric = Fabric(link=Link(bandwidth=50.0), faults=(Slow(rank=1),))
    rest = {"strategy": LocalSGD(every=3), "compressor": ErrorFeedback(of=TopK()), "fabric": fabric}
    value = Experiment(task=ByteGPT(width=64), **rest)
    assert Experiment.read(json.loads(json.dumps(value.plain()))) == value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("ranks", 0, "ranks=0: must be an integer in [1, 4096]"),
        ("strategy", "LocalSDG", "did you mean LocalSGD"),
        ("strategy.every", 8, "no such knob here"),
        ("bucket_mb", 0, "bucket_mb=0: must be a number in [0.01, 1024] MB"),
        ("lr", "fast", "lr='fast': must be a number"),
        ("task.layers", 0, "task.layers=0: must be an integer in [1, 48]"),
        ("task.heads", 3, "width=160: must be a multiple of heads=3"),
        ("fabric.faults", [{"Slow": {"rank": 4}}], "there are ranks 0 to 3"),
        ("fabric.link", {"Link": {"bandwidth": -1}}, "bandwidth=-1"),
    ],
)
def test_an_invalid_setting_is_refused_and_changes_nothing(path: str, value: Any, words: str) -> None:
    before = Experiment()
    with pytest.raises(KnobError) as caught:
        before.set(path, value)
    assert words in str(caught.value)
    assert before == Experiment()


def test_settings_build_on_each_other() -> None:
    after = Experiment().set("strategy", "LocalSGD").set("every", 16).set("compressor", "TopK").set("density", 0.05)
    assert after.strategy == LocalSGD(every=16)
    assert after.compressor == ErrorFeedback(of=TopK(density=0.05))


def test_every_pair_of_strategy_and_compressor_runs_or_is_refused_with_advice() -> None:
    pairs = product(members(Strategy).values(), members(Compressor).values())
    shipped = [(s, c) for s, c in pairs if s.__module__.startswith("workbench.")]
    for strategy, compressor in shipped:
        experiment = Experiment(strategy=strategy(), compressor=compressor.usual())
        try:
            assert experiment.checked().compressor == compressor.usual()
        except KnobError as refusal:
            assert "use " in str(refusal)
    with pytest.raises(KnobError, match="TorchDDP sends gradients by torch's own rules"):
        Experiment(strategy=TorchDDP(), compressor=TopK()).checked()
    assert Experiment(strategy=TorchDDP(), compressor=Dense()).checked()


def test_every_knob_has_a_doc() -> None:
    for path, k in walk(Experiment()):
        assert k.doc, path


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_valid(name: str) -> None:
    assert recipe(name).checked().ranks >= 1
    assert recipes()[name].__doc__


def test_an_unknown_recipe_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(KnobError, match="did you mean slow_link"):
        recipe("slowlink")


def test_the_old_name_turn_still_sets() -> None:
    assert Experiment().turn("lr", 0.1) == Experiment().set("lr", 0.1) != Experiment()
    assert Lab.turn is Lab.set
