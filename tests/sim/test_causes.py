"""How small a delay is named with its rank and phase; and ranks of a pipeline against those of their stage."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit import synthetic
from workbench import Experiment, simulate
from workbench.analysis import causes
from workbench.analysis.steps.collectives import of_others
from workbench.fabric import Fabric, Link, Noisy, Slow
from workbench.partitions import Pipeline


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_tenth_of_a_step_is_named_within_twenty_steps_though_all_of_eight_ranks_vary(phase: str) -> None:
    """Every phase of every rank varies by 5 %: the others feel but a part of the delay, and none other is named."""
    named = 0
    for seed in range(10):
        tl = synthetic.timeline(steps=20, ranks=8, slow=(seed % 8, phase, synthetic.factor(phase, 0.1)), link=False,
                                noise=0.05, hiccups=0.02, seed=seed, changes=())  # fmt: skip
        found = [(c.cause, c.ranks) for c in causes(tl) if c.ranks and c.cause != "frozen"]
        assert set(found) <= {(phase, (seed % 8,))}
        named += len(found)
    assert named >= 9


def test_who_packs_late_behind_its_backward_is_named_for_all_of_it() -> None:
    """Three of four buckets are packed while the rank still computes, each before the wire takes the next; each of
    the four has a tenth of a millisecond more."""
    slow = (2, "codec", synthetic.factor("codec", 0.1))
    tl = synthetic.timeline(steps=20, ranks=4, slow=slow, link=True, changes=())
    blamed = [c for c in causes(tl) if c.ranks]
    assert [(c.cause, c.ranks) for c in blamed] == [("codec", (2,))]
    assert "its packing takes 10.4 ms longer" in blamed[0].text


def test_what_began_sixteen_steps_ago_is_named_though_no_change_says_when() -> None:
    before, after = (synthetic.Host(4, 0.1, link=False, seed=1, noise=0.02, hiccups=0.0) for _ in range(2))
    for step in range(60):
        before.slow = (1, "backward", 1.4) if step >= 44 else None
        before.step(step)
        after.step(step)
    assert [(c.cause, c.ranks) for c in causes(before.timeline())] == [("backward", (1,))]
    assert causes(after.timeline()) == []


@pytest.mark.parametrize(("phase", "rank"), [("backward", 3), ("forward", 1)])
def test_a_slow_rank_of_a_pipeline_is_named_beside_the_bubble_and_none_is_without_one(phase: str, rank: int) -> None:
    def found(*faults: Slow) -> list[tuple[str, tuple[int, ...]]]:
        fabric = Fabric(link=Link(bandwidth=20_000.0), faults=(*faults, Noisy(spread=0.03)))
        wanted = Experiment(ranks=4, steps=30, pace=40.0, partition=Pipeline(stages=2), fabric=fabric)
        return [(c.cause, c.ranks) for c in causes(simulate(wanted).timeline)]

    assert found(Slow(rank=rank, factor=1.5, phase=phase)) == [("bubble", ()), (phase, (rank,))]
    assert found() == [("bubble", ())]


def test_the_median_of_the_others_is_what_leaving_each_out_gives() -> None:
    rng = np.random.default_rng(0)
    for p in range(2, 10):
        values = np.round(rng.normal(size=(5, 3, p)), 1)  # with ties
        values[rng.random(values.shape) < 0.1] = np.nan
        each = [np.median(np.delete(values, r, axis=-1), axis=-1) for r in range(p)]
        np.testing.assert_allclose(of_others(values), np.stack(each, axis=-1), atol=1e-15)
