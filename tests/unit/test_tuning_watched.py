"""Tests a search on training ranks on a virtual clock: results on three fabrics, cost, user's changes."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from tests.unit.virtual_ranks import VirtualRanks
from tests.waiting import until
from workbench.compressors import Cast, Dense, PowerSGD, TopK
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.run import RunError
from workbench.settings import KnobError
from workbench.sim import Costs
from workbench.sim.costs.durations import Duration
from workbench.sim.plan.search_space import list_candidates, space_of
from workbench.sim.plan.trials import Trial, above_trend, make_interval
from workbench.sim.tune.live_search import Tuning
from workbench.sim.tune.trial_runner import TrialLimits, TrialRunner
from workbench.strategies import DDP, LocalSGD
from workbench.tasks import ByteGPT

PATIENT = 600.0  # seconds, enough for a busy machine
E = Experiment(task=ByteGPT(layers=2, width=64, heads=2), ranks=4, batch=4, bucket_mb=0.05, eval_every=0)
KINDS = [Dense(), Cast(), TopK.usual(), PowerSGD.usual()]
SPACE = {"bucket_mb": [0.05, 0.2, 1.0], "compressor": KINDS, "strategy": [DDP(), LocalSGD(every=4), LocalSGD(every=8)]}
# the real durations, unknown to the tuner: passes that vary, codecs that cost time
SLOWLY = {Costs.kind(Cast()): (2e-9, 2e-9), Costs.kind(TopK.usual()): (4e-8, 1e-8)}
TRUTH = Costs(forward=Duration(0.01, 0.05), backward=Duration(0.02, 0.05), update=0.002, codec=SLOWLY, between=0.001)
KNOWN = Costs(forward=Duration(0.01, 0.05), backward=Duration(0.02, 0.05), update=0.002)
FABRICS = {
    "slow bandwidth": Link(bandwidth=50, latency=0.1), "high latency": Link(bandwidth=1000, latency=5.0),
    "fast": Link(bandwidth=20_000, latency=0.01),
}  # fmt: skip


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.sim.tune.trial_runner.POLL_SECONDS", 0.0)


def swept(e: Experiment) -> dict[str, Trial]:
    """Returns all settings, each measured like a trial."""
    ranks = VirtualRanks(e, TRUTH)
    by_hand = TrialRunner(ranks, TrialLimits(), list(SPACE), lambda: None, lambda trial: None)
    every = list_candidates(space_of(e, SPACE, {}))
    return {str(settings): by_hand.run_trial(Trial(settings=settings), None) for settings in every}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fabric", [pytest.param(name, marks=pytest.mark.long if name == "fast" else pytest.mark.every)
                                    for name in FABRICS])  # fmt: skip
def test_a_search_comes_within_5_percent_of_a_sweep_in_a_quarter_of_its_steps(fabric: str) -> None:
    e = E.set("fabric", Fabric(link=FABRICS[fabric]))
    sweep = swept(e)
    found = Tuning(VirtualRanks(e, TRUTH), SPACE, costs=KNOWN).start().wait(PATIENT)
    best = min(trial.seconds or 9.0 for trial in sweep.values())
    really = sweep[str(found.best.settings)].seconds or 9.0
    steps = sum(trial.steps for trial in sweep.values())
    print(f"{fabric}: {really / best:.3f} of the sweep's best, {found.steps} of {steps} steps")
    assert really <= 1.05 * best
    assert found.steps <= steps / 4


def tuning(ranks: VirtualRanks, space: Any = None, **how: Any) -> Tuning:
    return Tuning(ranks, space or {"bucket_mb": [0.05, 0.2, 1.0]}, costs=KNOWN, **{"trials": 4, **how})


SLOW = E.set("fabric", Fabric(link=FABRICS["high latency"]))


def test_the_simulator_orders_the_trials_and_the_best_setting_stays() -> None:
    ranks = VirtualRanks(SLOW, TRUTH)
    search = tuning(ranks).start()
    found = search.wait(PATIENT)
    assert found.trials[0].settings == {"bucket_mb": 0.05} and found.trials[0].verdict == "in force before"
    assert [t.settings["bucket_mb"] for t in found.trials[1:]] == [1.0], "far slower ones are left out"
    assert found.best == found.trials[1] and ranks.experiment.bucket_mb == 1.0 and search.state == "done"
    assert [t.settings["bucket_mb"] for t in found.left_out] == [0.2], "not what was in force, which has been tried"
    assert found.best.predicted and found.best.high - found.best.low <= 2 * 0.03 * (found.best.seconds or 0)
    assert "faster by" in found.best.verdict and "bucket_mb=1" in repr(found)


def test_a_setting_that_harms_the_loss_is_rejected_and_a_harmless_one_is_used() -> None:
    noise = Random(1)

    def loss(step: int, e: Experiment) -> float:
        harm = 0.4 if isinstance(e.compressor, TopK) or "TopK" in repr(e.compressor) else 0.0
        return 4.0 - 0.3 * float(np.log(4 * step + 1)) + harm + noise.gauss(0.0, 0.02)

    ranks = VirtualRanks(E.set("fabric", Fabric(link=FABRICS["slow bandwidth"])), KNOWN, loss=loss)
    space = {"compressor": [Dense(), TopK.usual(), PowerSGD.usual()]}
    search = tuning(ranks, space)
    search.start().wait(PATIENT)
    said = {type(t.settings["compressor"]).__name__ + repr(t.settings["compressor"]): t for t in search.trials}
    harmed = next(t for name, t in said.items() if "TopK" in name)
    kept = next(t for name, t in said.items() if "PowerSGD" in name)
    assert harmed.verdict.startswith("loss worse: +") and not harmed.fit and harmed.loss and harmed.loss.low > 0.02
    assert kept.fit and kept.loss and kept.loss.high <= 0.02 and search.best == kept
    assert ranks.experiment.compressor == PowerSGD.usual()


def test_a_refusal_is_reported_and_leaves_no_partial_setting() -> None:
    ranks = VirtualRanks(SLOW, TRUTH, refuses=lambda e: "no room" if e.bucket_mb == 1.0 else None)
    search = tuning(ranks, {"compressor": [Dense(), Cast()], "bucket_mb": [0.05, 0.8, 1.0]}, trials=6)
    found = search.start().wait(PATIENT)
    refused = [t for t in found.trials if t.verdict == "refused: no room"]
    assert refused and all(t.settings["bucket_mb"] == 1.0 and t.seconds is None and not t.fit for t in refused)
    assert found.best.settings["bucket_mb"] == 0.8 and ranks.experiment.bucket_mb == 0.8


def test_a_lost_rank_ends_the_trial_but_not_the_search() -> None:
    ranks = VirtualRanks(SLOW, TRUTH)

    def die(step: int) -> None:
        if ranks.experiment.bucket_mb == 1.0 and not ranks.lost:
            ranks.lost.append((step, 0.0, {"gone": [3]}))
            ranks.members = (0, 1, 2)

    ranks.on_step = die
    search = tuning(ranks, {"bucket_mb": [0.05, 0.8, 1.0]}, trials=5)
    found = search.start().wait(PATIENT)
    verdicts = [t.verdict for t in found.trials]
    assert "rank 3 was lost during the trial" in verdicts, verdicts
    after = found.trials[verdicts.index("rank 3 was lost during the trial") + 1]
    assert after.settings == {"bucket_mb": 0.05} and after.verdict == "in force before" and after.ranks == 3
    assert found.best.ranks == 3 and found.best.settings == {"bucket_mb": 0.8}


def test_a_users_change_of_a_tuned_knob_ends_the_search_and_stays() -> None:
    ranks = VirtualRanks(SLOW, TRUTH)
    ranks.on_step = lambda step: None if step < 35 or ranks.changes else ranks.set("bucket_mb", 0.5) and None
    search = tuning(ranks)
    search.start()
    assert until(lambda: not search.live, PATIENT)
    assert search.state == "overruled" and "bucket_mb was set to 0.5 by hand" in search.said
    assert ranks.experiment.bucket_mb == 0.5


def test_a_trial_restarts_if_another_knob_is_set() -> None:
    quiet, moved = VirtualRanks(SLOW, KNOWN), VirtualRanks(SLOW, KNOWN)
    moved.on_step = lambda step: None if step < 42 or moved.changes else moved.set("lr", 0.01) and None
    plain, anew = (tuning(ranks, trials=1).start().wait(PATIENT).trials[0].steps for ranks in (quiet, moved))
    assert anew >= plain + 6, "steps before it do not count"


def test_a_paused_search_begins_no_trial_and_a_stopped_one_leaves_the_best() -> None:
    ranks = VirtualRanks(SLOW, TRUTH)
    search = tuning(ranks, {"bucket_mb": [0.05, 0.8, 0.9, 1.0]}, trials=4)
    ranks.on_step = lambda step: search.pause() if len(search.trials) == 2 else None
    search.start()
    assert until(lambda: search.state == "paused", PATIENT) and search.best
    paused = len(search.trials)
    assert ranks.experiment.bucket_mb == search.best.settings["bucket_mb"], "meanwhile the best so far is set"
    search.stop()
    assert len(search.wait(PATIENT).trials) == paused and search.state == "stopped"
    search.use(1)
    assert ranks.experiment.bucket_mb == 0.05
    with pytest.raises(KnobError, match=f"number=9: must be a trial's number, from 1 to {paused}"):
        search.use(9)


def test_the_old_setting_is_restored_without_keep_or_after_an_error() -> None:
    ranks = VirtualRanks(SLOW, TRUTH)
    assert tuning(ranks, keep=False).start().wait(PATIENT).best.settings == {"bucket_mb": 1.0}
    assert ranks.experiment.bucket_mb == 0.05
    broken = VirtualRanks(SLOW, TRUTH)

    def fail(step: int) -> None:
        if broken.experiment.bucket_mb == 1.0:
            broken.on_step = lambda step: None
            raise ZeroDivisionError

    broken.on_step = fail
    with pytest.raises(ZeroDivisionError):
        tuning(broken).start().wait(PATIENT)
    assert broken.experiment.bucket_mb == 0.05


def test_a_run_that_ends_before_the_search_raises_run_error() -> None:
    with pytest.raises(RunError, match=r"the run ended before step 45; train longer, or take fewer trials"):
        tuning(VirtualRanks(SLOW, TRUTH, steps=36)).start().wait(PATIENT)


@pytest.mark.parametrize("steps", [36, 50, 70])
def test_a_search_without_steps_left_restores_the_old_setting(steps: int) -> None:
    ranks = VirtualRanks(SLOW, TRUTH, steps=steps)
    search = tuning(ranks, {"bucket_mb": [0.05, 0.2, 1.0], "strategy": [DDP(), LocalSGD(every=4)]}, trials=6)
    with pytest.raises(RunError, match="the run ended before"):
        search.start().wait(PATIENT)
    assert (ranks.experiment.bucket_mb, ranks.experiment.strategy) == (0.05, DDP()), search.trials
    assert search.state == "failed" and search.said.endswith("bucket_mb=0.05, strategy=DDP is set, as before")


def test_a_search_that_cannot_restore_the_old_setting_reports_it() -> None:
    ranks = VirtualRanks(SLOW, TRUTH, steps=50)
    really = ranks.set

    def refuse(path: str, value: Any) -> Any:
        if ranks.now >= 50:
            raise KnobError("the lab is closed")
        return really(path, value)

    ranks.set = refuse  # type: ignore[method-assign]
    search = tuning(ranks)
    with pytest.raises(RunError, match="the run ended"):
        search.start().wait(PATIENT)
    assert search.said.endswith("; what was set before could not be set again: the lab is closed")


def test_an_inconclusive_loss_is_reported_with_a_remedy() -> None:
    noise = Random(3)
    ranks = VirtualRanks(SLOW, TRUTH, loss=lambda step, e: 4.0 + noise.gauss(0.0, 2.0))
    search = tuning(ranks, {"strategy": [DDP(), LocalSGD(every=4)]}, most=12, trials=2).start()
    search.wait(PATIENT)
    said = search.trials[-1].verdict
    assert said.startswith("loss unclear after 12 steps: it may be up to +")
    assert "its trend, which has" in said and "let the run train longer before you tune" in said


@pytest.mark.parametrize(("said", "asked"), [
    ("precision=0: must be a number between 0 and 1", {"precision": 0}),
    ("most=0: must be an integer of at least 1", {"most": 0}),
    ("bucket_mb=4: must be a list of values to try, or a range", {"space": {"bucket_mb": 4}}),
    ("ranks: cannot change while a run is live", {"space": {"ranks": [2, 4]}}),
    ("within: is for a list of knobs", {"within": {"bucket_mb": (0.1, 1.0)}}),
    ("paths: 900 combinations of settings; must be at most", {"space": {"lr": [0.1 + i / 1e4 for i in range(900)]}}),
])  # fmt: skip
def test_invalid_arguments_raise_knob_error(said: str, asked: dict[str, Any]) -> None:
    with pytest.raises(KnobError, match=said):
        tuning(VirtualRanks(SLOW, KNOWN), **asked)


def test_an_interval_has_its_stated_coverage_despite_early_stopping() -> None:
    draw, missed, looks = np.random.default_rng(3), 0, (8, 12, 18, 27, 41, 60)
    for _ in range(600):
        x = draw.normal(1.0, 0.1, 60)
        every = [make_interval(x[:n], 0.9, len(looks)) for n in looks]
        missed += any(not one.low <= 1.0 <= one.high for one in every)
    assert missed <= 60, "at none of the looks, in nine of ten runs"


def test_a_loss_above_its_trend_is_detected_at_the_stated_rate() -> None:
    draw, told, harmed = np.random.default_rng(4), 0, 0
    x, later = 4.0 * np.arange(1, 121), 4.0 * np.arange(121, 151)
    for _ in range(400):
        y = 4 - 0.3 * np.log(x) + draw.normal(0, 0.05, len(x))
        for over in (0.0, 0.1):
            found = above_trend((x, y), (later, 4 - 0.3 * np.log(later) + over + draw.normal(0, 0.05, 30)), 0.95)
            assert found is not None
            told += over == 0.0 and found.low > 0.0
            harmed += over == 0.1 and found.low > 0.0
    assert told <= 30 and harmed >= 390, "0.1 is two deviations of one step's loss"
