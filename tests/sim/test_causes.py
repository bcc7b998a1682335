"""Tests how small a delay can be attributed to a rank and phase, and comparisons within a pipeline stage."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit import synthetic
from workbench import Experiment, simulate
from workbench.analysis import find_causes
from workbench.analysis.steps.collectives import of_others
from workbench.analysis.stragglers.causes import excess_seconds
from workbench.fabric import Fabric, Link, Noisy, Slow
from workbench.partitions import Pipeline


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_delay_of_10_percent_is_named_within_20_steps_although_all_8_ranks_vary(phase: str) -> None:
    """Every phase of every rank varies by 5 %. Other ranks feel part of the delay, but none is blamed."""
    named = 0
    for seed in range(10):
        tl = synthetic.timeline(steps=20, ranks=8, slow=(seed % 8, phase, synthetic.factor(phase, 0.1)), link=False,
                                noise=0.05, hiccups=0.02, seed=seed, changes=())  # fmt: skip
        found = [(c.cause, c.ranks) for c in find_causes(tl) if c.ranks and c.cause != "frozen"]
        assert set(found) <= {(phase, (seed % 8,))}
        named += len(found)
    assert named >= 9


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.01), (8, 0.02), (32, 0.04)])
def test_independent_noise_is_seldom_taken_for_a_delay(ranks: int, share: float) -> None:
    rng = np.random.default_rng(0)
    found = [excess_seconds(1 + 0.3 * rng.standard_normal((40, ranks)), 1.0).any() for _ in range(1000)]
    assert np.mean(found) <= share


def test_a_rank_with_slow_packing_is_blamed_for_the_whole_delay() -> None:
    """Three of four buckets are packed while the rank still computes, each before the transfer of the next begins.

    Each of the four takes 0.1 ms longer.
    """
    slow = (2, "codec", synthetic.factor("codec", 0.1))
    tl = synthetic.timeline(steps=20, ranks=4, slow=slow, link=True, changes=())
    blamed = [c for c in find_causes(tl) if c.ranks]
    assert [(c.cause, c.ranks) for c in blamed] == [("codec", (2,))]
    assert "its packing takes 10.4 ms longer" in blamed[0].text


def test_a_delay_that_began_16_steps_ago_is_named_without_a_recorded_change() -> None:
    before, after = (synthetic.Host(4, 0.1, link=False, seed=1, noise=0.02, hiccups=0.0) for _ in range(2))
    for step in range(60):
        before.slow = (1, "backward", 1.4) if step >= 44 else None
        before.step(step)
        after.step(step)
    assert [(c.cause, c.ranks) for c in find_causes(before.timeline())] == [("backward", (1,))]
    assert find_causes(after.timeline()) == []


@pytest.mark.parametrize(("phase", "rank"), [("backward", 3), ("forward", 1)])
def test_a_pipeline_names_its_slow_rank_and_no_rank_without_a_fault(phase: str, rank: int) -> None:
    def found(*faults: Slow) -> list[tuple[str, tuple[int, ...]]]:
        fabric = Fabric(link=Link(bandwidth=20_000.0), faults=(*faults, Noisy(spread=0.03)))
        wanted = Experiment(ranks=4, steps=30, pace=40.0, partition=Pipeline(stages=2), fabric=fabric)
        return [(c.cause, c.ranks) for c in find_causes(simulate(wanted).timeline)]

    assert found(Slow(rank=rank, factor=1.5, phase=phase)) == [("bubble", ()), (phase, (rank,))]
    assert found() == [("bubble", ())]


def test_of_others_equals_the_median_without_each_rank() -> None:
    rng = np.random.default_rng(0)
    for p in range(2, 10):
        values = np.round(rng.normal(size=(5, 3, p)), 1)  # with ties
        values[rng.random(values.shape) < 0.1] = np.nan
        each = [np.median(np.delete(values, r, axis=-1), axis=-1) for r in range(p)]
        np.testing.assert_allclose(of_others(values), np.stack(each, axis=-1), atol=1e-15)
