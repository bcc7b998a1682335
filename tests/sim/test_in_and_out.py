"""Switches to each strategy and back, and compares the final loss with plain data parallelism."""

from __future__ import annotations

from functools import cache

import pytest

from tests.laws.claims import RATES, SUMS
from tests.ranks import shipped
from tests.thinned import thinned
from workbench import simulate
from workbench.experiment import Experiment
from workbench.run import Run
from workbench.settings import Change
from workbench.strategies import DDP, Strategy
from workbench.tasks import Digits

ALL = {n: cls for n, cls in shipped(Strategy).items() if not cls.opaque and cls is not DDP}
OTHERS = [n for n, cls in ALL.items() if cls.plain or n in RATES]
IN, OUT, AFTER = 30, 50, 50  # another strategy trains from step IN to OUT; the loss is compared AFTER steps later
SEEDS = range(5)

pytestmark = pytest.mark.slow


def held_out(run: Run) -> float:
    """Returns the last held-out loss."""
    rows = run.samples
    return float(rows[rows.name == "held_out"].value.iloc[-1])


def experiment(seed: int) -> Experiment:
    task = Digits(width=4, hidden=16)
    return Experiment(task=task, ranks=4, pace=10, steps=OUT + AFTER, eval_every=OUT + AFTER, seed=seed)


@cache
def unswitched() -> tuple[float, float]:
    """Returns the smallest and the largest held-out loss of plain data parallelism over the seeds."""
    found = [held_out(simulate(experiment(seed), real=True)) for seed in SEEDS]
    return min(found), max(found)


@pytest.mark.parametrize("name", thinned([(n,) for n in OTHERS], of=3, long=0))
def test_fifty_steps_after_switching_back_the_loss_is_in_the_unswitched_range(name: str) -> None:
    chosen = experiment(SEEDS[0])
    changes = [Change(IN, "strategy", name), Change(OUT, "strategy", "DDP")]
    factor = 1 / chosen.ranks if name in SUMS else RATES.get(name, 1.0)
    if factor != 1.0:
        rate = chosen.checked().lr
        changes += [Change(IN, "lr", factor * rate), Change(OUT, "lr", rate)]
    run = simulate(chosen, changes=changes, real=True)
    assert sorted(c.path for c in run.changes) == sorted(c.path for c in changes)
    low, high = unswitched()
    assert low <= held_out(run) <= high
