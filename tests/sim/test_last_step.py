"""Tests checkpoints of a run's last step, under every strategy of the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kept import simulated
from tests.ranks import batch, experiment, make_fitting, mse, net, shipped, toy
from tests.thinned import thinned
from workbench import simulate
from workbench.record.checkpoints import Checkpoint, list_checkpoints
from workbench.sim.run.resuming import model_of
from workbench.strategies import Strategy

pytestmark = pytest.mark.ranks
STRATEGIES = {name: cls for name, cls in shipped(Strategy).items() if not cls.opaque}
RANKS, STEPS = 3, 8


def held_out(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(mse(model, batch(1000, 0, 0, 64)))


@pytest.mark.parametrize(("name", "every"), thinned(((n, k) for n in STRATEGIES for k in (7, 8)), of=12, long=3))
def test_a_checkpoint_of_the_last_step_is_made_and_can_be_read(name: str, every: int, tmp_path: Path) -> None:
    strategy = make_fitting(STRATEGIES[name], RANKS)
    done = simulate(experiment(RANKS, STEPS, strategy=strategy, pace=5.0, save_every=every), real=True,
                    checkpoints=tmp_path)  # fmt: skip
    assert not done.details("not saved")
    last = Checkpoint.open(list_checkpoints(tmp_path)[-1])
    assert last.step == STEPS or (every == 7 and last.step == 7)
    assert held_out(model_of(last, toy())) < held_out(net())


@pytest.mark.parametrize("name", [name for name, cls in STRATEGIES.items() if cls.lockstep])
def test_the_last_checkpoint_equals_that_of_a_longer_run(name: str, tmp_path: Path) -> None:
    for steps in (STEPS, 2 * STEPS):
        simulated(RANKS, steps, tmp_path / str(steps), STEPS, strategy=make_fitting(STRATEGIES[name], RANKS))
    ended, passed = (Checkpoint.open(list_checkpoints(tmp_path / str(steps))[0]) for steps in (STEPS, 2 * STEPS))
    assert ended.step == passed.step == STEPS
    for mine, right in zip(model_of(ended, toy()).parameters(), model_of(passed, toy()).parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, cls in STRATEGIES.items() if not cls.lockstep])
def test_a_task_keeps_its_model_even_if_ranks_have_no_common_step(name: str, tmp_path: Path) -> None:
    strategy = make_fitting(STRATEGIES[name], RANKS)
    e = experiment(RANKS, STEPS, task=toy(keeps=True), strategy=strategy, pace=5.0)
    simulate(e, real=True, checkpoints=tmp_path)
    (kept,) = map(Checkpoint.open, list_checkpoints(tmp_path))
    assert kept.step == STEPS
    assert held_out(model_of(kept, toy())) < held_out(net())
