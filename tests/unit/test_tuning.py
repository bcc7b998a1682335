"""Tests `tune`, which searches knobs by measuring, in the simulator and while ranks train."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from workbench import Experiment, simulate, tune
from workbench.fabric import Fabric, Link
from workbench.fabric.slow import Slow
from workbench.settings import KnobError
from workbench.sim.tune.trial_runner import step_seconds
from workbench.strategies import BackupWorkers, ByteScheduler, PostLocalSGD
from workbench.tasks import ByteGPT

# latency makes small pieces costly, and urgent ones wait behind large pieces: the best size is in between
SLOW = Experiment(
    task=ByteGPT(layers=4, width=64, heads=2), ranks=4, batch=4, pace=60.0, bucket_mb=0.2, eval_every=0,
    strategy=ByteScheduler(partition_mb=0.003, credit_mb=0.003), fabric=Fabric(link=Link(bandwidth=100, latency=0.02)),
)  # fmt: skip
SIZES = (0.01, 0.03, 0.1, 0.3, 1.0)  # MB
WITHIN = {"partition_mb": (0.003, 1.0), "credit_mb": (0.003, 1.0)}


def step(e: Experiment) -> float:
    rows = simulate(e.set("steps", 11)).timeline.spans.rows()
    mine = rows[(rows.rank == 0) & rows.equal("lane", "step") & (rows.step >= 3)]
    return float(np.mean(mine.t1 - mine.t0))


@pytest.mark.long
def test_it_finds_piece_sizes_as_good_as_the_best_of_a_fine_grid() -> None:
    found = tune(SLOW, ["partition_mb", "credit_mb"], within=WITHIN, trials=20)
    assert found.trials[0].settings == {"strategy.partition_mb": 0.003, "strategy.credit_mb": 0.003}
    assert found.trials[0].seconds == pytest.approx(step(SLOW)), "what is in force is tried first"
    assert found.best.seconds == min(trial.seconds for trial in found.trials if trial.seconds)
    best = found.best.settings
    assert step(SLOW.set("partition_mb", best["strategy.partition_mb"]).set(
        "credit_mb", best["strategy.credit_mb"])) == pytest.approx(found.best.seconds)  # fmt: skip
    grid = {(a, b): step(SLOW.set("partition_mb", a).set("credit_mb", b)) for a in SIZES for b in SIZES}
    assert 0.03 <= min(grid, key=lambda at: grid[at])[0] <= 0.3, "the best lies between, not at an end"
    assert (found.best.seconds or math.inf) < 1.02 * min(grid.values()) < 0.9 * step(SLOW)


def test_the_seed_determines_the_trials() -> None:
    same, again, other = (
        [trial.settings for trial in tune(SLOW, ["credit_mb"], within={"credit_mb": (0.01, 1.0)}, trials=3, steps=2,
                                          seed=seed).trials]
        for seed in (0, 0, 1)
    )  # fmt: skip
    assert same == again and same[0] == other[0] and same[1:] != other[1:]
    assert all(0.01 <= trial["strategy.credit_mb"] <= 1.0 for trial in same[1:]), "what is in force may lie outside"


def test_choices_and_integers_are_searched_and_refused_settings_have_no_time() -> None:
    e = SLOW.set("strategy", "LocalSGD")
    found = tune(e, ["strategy.every"], within={"strategy.every": (1, 4)}, trials=12)
    assert all(isinstance(trial.settings["strategy.every"], int) for trial in found.trials)
    orders = tune(SLOW, ["order"], trials=4, steps=2)
    assert {trial.settings["strategy.order"] for trial in orders.trials} == {"forward", "fifo"}
    stages = SLOW.set("strategy", "DDP").set("partition", {"Pipeline": {"micros": 1}})
    tight = tune(stages, ["micros"], trials=12, steps=2, within={"micros": (1, 5)})
    refused = {trial.settings["partition.micros"] for trial in tight.trials if trial.seconds is None}
    assert refused and refused <= {3, 5}, "a batch of 4 cannot be cut into as many equal parts"


@pytest.mark.parametrize(("said", "asked"), [
    ("task: must be a live knob with a range or with choices", {"paths": ["task"]}),
    ("paths='lr': must be a list of knobs", {"paths": "lr"}),
    ("paths=\\[\\]: must be a list of knobs", {"paths": []}),
    ("nonsense", {"paths": ["nonsense"]}),
    ("trials=0: must be an integer of at least 1", {"trials": 0}),
    ("steps=True: must be an integer of at least 1", {"steps": True}),
    ("within: lr: must be among the tuned paths", {"within": {"lr": (0.1, 1.0)}}),
    ("within credit_mb=\\(2.0, 1.0\\): must be two numbers, the lower one first",
     {"paths": ["credit_mb"], "within": {"credit_mb": (2.0, 1.0)}}),
    ("within credit_mb=5: must be two numbers", {"paths": ["credit_mb"], "within": {"credit_mb": 5}}),
    ("within credit_mb=\\('a', 'b'\\): must be two numbers",
     {"paths": ["credit_mb"], "within": {"credit_mb": ("a", "b")}}),
    ("within=5: must be a range by path", {"within": 5}),
    ("paths=\\[5\\]: must be a list of knobs", {"paths": [5]}),
    ("seed='x': must be an integer in", {"seed": "x"}),
    ("seed=-1: must be an integer in", {"seed": -1}),
    ("credit_mb=-1.0: must be a number in", {"paths": ["credit_mb"], "within": {"credit_mb": (-1.0, 1.0)}}),
])  # fmt: skip
def test_invalid_arguments_raise_knob_error(said: str, asked: dict[str, Any]) -> None:
    with pytest.raises(KnobError, match=said):
        tune(SLOW, **asked)


def test_if_every_trial_is_refused_the_reason_is_raised() -> None:
    with pytest.raises(KnobError, match=r"all 2 trials were refused.*pace=0: the duration of compute is unknown"):
        tune(SLOW.set("pace", 0.0), ["credit_mb"], trials=2)


def test_steps_that_a_rank_skips_are_not_waited_for() -> None:
    faults = Fabric(faults=(Slow(rank=0, factor=3.0),))
    e = Experiment(ranks=4, pace=10.0, steps=60, eval_every=0, strategy=BackupWorkers(backup=1), fabric=faults)
    found = tune(e, ["strategy.backup"], trials=2, within={"strategy.backup": (1, 2)})
    assert all(trial.seconds for trial in found.trials), "as many as it makes of those that are simulated"
    done = simulate(e)
    made = done.spans[(done.spans["rank"] == 0) & (done.spans.lane == "step")]
    assert len(made) < 30, "rank 0 falls behind, and skips some"
    assert step_seconds(done, 3) == pytest.approx((made.t1 - made.t0)[made.step >= 3].tolist())


def test_without_optuna_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(KnobError, match=r"pip install 'training-workbench\[tune\]'"):
        tune(SLOW, ["credit_mb"])
    with pytest.raises(KnobError, match="takes an Experiment to simulate or a Lab with a live run, not str"):
        tune("DDP")  # type: ignore[arg-type]


# twelve steps in which ranks average, and shorter ones in which they do not
TWO_KINDS = SLOW.set("strategy", PostLocalSGD(warmup=12, every=100))


def test_steps_before_it_has_settled_do_not_count() -> None:
    found = [tune(TWO_KINDS, ["bucket_mb"], trials=1, settle=settle, steps=5).best.seconds for settle in (0, 12)]
    assert (found[1] or math.inf) < 0.9 * (found[0] or 0.0)
