"""Runs `tune` on training ranks: each trial is a live change, and the best value stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench import tuned
from tests.labs import apart
from tests.waiting import until
from workbench import Experiment, Lab, tune
from workbench.fabric import Fabric, Link
from workbench.run import RunError
from workbench.settings import KnobError
from workbench.strategies import ByteScheduler
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.engine

SLOW = Experiment(
    task=ByteGPT(layers=2, width=64, heads=2), ranks=2, batch=4, steps=100_000, pace=30.0, bucket_mb=0.2, eval_every=0,
    strategy=ByteScheduler(partition_mb=0.002, credit_mb=0.002), fabric=Fabric(link=Link(bandwidth=100, latency=2.0)),
)  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="tuning") as lab:
            yield lab.wait(120)


def test_ranks_go_on_with_the_best_trial(lab: Lab) -> None:
    with pytest.raises(KnobError, match=r"no run is live on this lab; start one with lab\.run\(\)"):
        lab.tune()
    run = lab.run(SLOW)
    found = tune(lab, {"partition_mb": [0.002, 0.01, 0.1, 1.0]}, steps=3, settle=1)
    assert found.trials[0].settings == {"strategy.partition_mb": 0.002}
    assert (found.best.seconds or 9.0) < 0.5 * (found.trials[0].seconds or 0.0), "a hundred messages each 2 ms late"
    best = found.best.settings["strategy.partition_mb"]
    assert lab.experiment.strategy == ByteScheduler(credit_mb=0.002, partition_mb=best)
    tried = [change.value for change in lab.changes if change.path == "strategy.partition_mb"]
    assert tried[: len(found.trials) - 1] == [t.settings["strategy.partition_mb"] for t in found.trials[1:]]
    lab.stop()
    run.wait(60)


def test_a_search_ends_on_a_change_by_hand_or_on_request(lab: Lab) -> None:
    run = lab.run(SLOW)
    search = lab.tune({"partition_mb": [0.002, 0.01, 0.1]}, steps=400, most=400)
    with pytest.raises(KnobError, match=r"a search is under way; end it with lab\.tuning\.stop\(\)"):
        lab.tune()
    assert until(lambda: bool(search.trials), 120), search
    lab.set("partition_mb", 0.05).wait(60)
    assert until(lambda: not search.live) and search.state == "overruled"
    assert lab.experiment.strategy.partition_mb == 0.05
    search = lab.tune({"partition_mb": [0.05, 0.1]}, steps=400, most=400)
    assert until(lambda: bool(search.trials), 120), search
    search.stop()
    assert until(lambda: not search.live) and search.state == "stopped"
    assert lab.experiment.strategy.partition_mb == 0.05
    lab.stop()
    run.wait(60)


@pytest.mark.long
def test_a_run_that_ends_before_the_search_raises_run_error(lab: Lab) -> None:
    lab.run(SLOW.set("steps", 12))
    with pytest.raises(RunError, match=r"the run (ended before step .*|has ended); train longer, or take fewer trials"):
        tune(lab, ["credit_mb"], trials=20, steps=100)


@pytest.mark.every
@pytest.mark.parametrize("wire", tuned.LINKS)
def test_a_search_comes_within_5_percent_of_a_sweep_in_a_quarter_of_its_steps(lab: Lab, wire: str) -> None:
    """Ranks are paced and the loss is ignored, because only the step time counts."""
    found = tuned.searched(lab, tuned.LINKS[wire])
    print(f"{wire}: {tuned.ratio(found):.3f} of the sweep's best, {found['steps']} of {found['swept']} steps\n{found}")
    assert tuned.ratio(found) <= tuned.WITHIN and found["steps"] <= tuned.SHARE * found["swept"]
