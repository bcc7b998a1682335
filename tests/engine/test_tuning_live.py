"""`tune` on ranks that train: each trial is a live change, and the best stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs import apart
from workbench import Experiment, Lab, tune
from workbench.fabric import Fabric, Link
from workbench.run import RunError
from workbench.settings import KnobError
from workbench.strategies import ByteScheduler
from workbench.tasks import ByteGPT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SLOW = Experiment(
    task=ByteGPT(layers=2, width=64, heads=2), ranks=2, batch=4, steps=100_000, pace=30.0, bucket_mb=0.2, eval_every=0,
    strategy=ByteScheduler(partition_mb=0.002, credit_mb=0.002), fabric=Fabric(link=Link(bandwidth=100, latency=2.0)),
)  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="tuning") as lab:
            yield lab.wait(120)


def test_the_best_of_the_trials_is_what_the_ranks_go_on_with(lab: Lab) -> None:
    with pytest.raises(KnobError, match=r"no run is live on this lab; start one with lab\.run\(\)"):
        tune(lab)
    run = lab.run(SLOW)
    found = tune(lab, ["partition_mb"], within={"partition_mb": (0.01, 1.0)}, trials=4, steps=3, settle=1)
    assert found.trials[0].settings == {"strategy.partition_mb": 0.002}
    assert (found.best.seconds or 0.0) < 0.5 * (found.trials[0].seconds or 0.0), "a hundred messages each 2 ms late"
    best = found.best.settings["strategy.partition_mb"]
    assert lab.experiment.strategy == ByteScheduler(credit_mb=0.002, partition_mb=best)
    tried = [change.value for change in lab.changes if change.path == "strategy.partition_mb"]
    assert tried == [*(trial.settings["strategy.partition_mb"] for trial in found.trials), tried[-1]]
    lab.stop()
    run.wait(60)


def test_a_search_that_breaks_off_leaves_what_was_set(lab: Lab) -> None:
    run = lab.run(SLOW)

    class Enough(Exception):
        """A person has seen enough."""

    with pytest.MonkeyPatch.context() as patch:
        times = iter([1.0, 2.0])

        def later(*_: object) -> float:
            try:
                return next(times)
            except StopIteration:
                raise Enough from None

        patch.setattr("workbench.sim.tuner.median_step", later)
        with pytest.raises(Enough):
            tune(lab, ["partition_mb"], trials=8)
    assert lab.live and lab.experiment.strategy == SLOW.strategy
    lab.stop()
    run.wait(60)


@pytest.mark.long
def test_a_run_that_ends_first_is_said_in_words(lab: Lab) -> None:
    lab.run(SLOW.set("steps", 12))
    with pytest.raises(RunError, match=r"the run ended before step .*; train longer, or take fewer trials"):
        tune(lab, ["credit_mb"], trials=20, steps=100)
