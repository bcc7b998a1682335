"""Compares Threshold-v with its rule, its bound on every element, and the record."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, weights
from workbench import simulate
from workbench.compressors import Dense, ErrorFeedback, Threshold
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory
from workbench.settings import Change, KnobError

pytestmark = pytest.mark.ranks


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(x: torch.Tensor, v: float) -> list[int]:
    index, values = Threshold(threshold=v).choose(x, Memory(), Bucket(0, x, tuple(placed(tuple(x.shape))), 0))
    assert torch.equal(x[index], values)
    return sorted(index.tolist())


@pytest.mark.parametrize("n", [50, 300_000])
@pytest.mark.parametrize("v", [0.3, 2.0, 9.0])
def test_only_entries_that_reach_v_are_sent(n: int, v: float) -> None:
    x = noise(n, n)
    assert kept(x, v) == [i for i, value in enumerate(x.tolist()) if abs(value) >= v]


def test_an_entry_equal_to_v_is_sent() -> None:
    assert kept(torch.tensor([0.5, -0.5, 0.49999, 0.0]), 0.5) == [0, 1]


def test_a_bucket_without_positive_entries_is_not_sent_whole() -> None:
    """This would fail if v were limited by the largest signed entry."""
    x = -noise(1, 1000).abs()
    assert 0 < len(kept(x, 2.0)) < 100 and kept(x, 100.0) == []


@pytest.mark.parametrize("v", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_error_is_bounded_in_every_element_and_in_length(v: float, ranks: int) -> None:
    g = noise(2, ranks, 2000) ** 3
    out = exchange(Threshold(threshold=v), g, placed((2000,)), [Memory() for _ in range(ranks)])
    assert float((out - g.double().sum(0)).abs().max()) < ranks * v
    if ranks == 1:
        off, passed = float((out - g[0]).square().sum()), len(kept(g[0], v))
        assert off <= min(2000 * v * v, (1 - passed / 2000) * float(g.square().sum())) * (1 + 1e-6)


def test_under_error_feedback_the_residual_stays_below_v() -> None:
    memories = [Memory(), Memory()]
    for step in range(50):
        exchange(ErrorFeedback(of=Threshold(threshold=0.5)), 0.1 * noise(step, 2, 300), placed((300,)), memories)
        assert all(float(m.buffers["residual"]["p0"].abs().max()) < 0.5 for m in memories)


def test_an_entry_below_v_on_one_rank_is_sent_by_the_other_ranks() -> None:
    g = torch.stack([torch.zeros(100), torch.ones(100)])
    out = exchange(Threshold(threshold=0.5), g, placed((100,)), [Memory(), Memory()])
    assert torch.equal(out, torch.ones(100).double())


def test_without_entries_above_v_a_bucket_costs_eight_bytes_and_changes_nothing() -> None:
    sessions = run(experiment(3, 4, compressor=Threshold(threshold=1e6)))
    buckets = len(sessions[0].layout.buckets)
    for s in sessions:
        assert sum(n for step, _, n in s.record.comm() if step == 2) == 2 * 8 * buckets
        assert all(v == 0 for _, what, _, v in s.record.samples if what == "density")
    still = run(experiment(3, 1, compressor=Threshold(threshold=1e6)))
    assert torch.equal(weights(sessions[0]), weights(still[0]))


def test_a_low_threshold_equals_plain_averaging() -> None:
    low, dense = (run(experiment(3, 6, compressor=c))[0] for c in (Threshold(threshold=1e-12), Dense()))
    torch.testing.assert_close(weights(low), weights(dense), rtol=1e-5, atol=1e-7)


def test_a_live_change_takes_effect_in_the_next_step_and_keeps_the_residual() -> None:
    e = experiment(2, 12, compressor=Threshold.usual())
    sessions = run(e, Change(4, "threshold", 1e5), Change(8, "threshold", 1e-12))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    share = {
        step: [v for k, what, _, v in sessions[0].record.samples if what == "density" and k == step]
        for step in (3, 4, 7, 8)
    }
    assert sum(share[3]) > 0 and not sum(share[4]) and not sum(share[7]) and min(share[8]) > 0.9
    assert all(float(r.abs().max()) < 1e-6 for s in sessions for r in s.rank.memory.buffers["residual"].values())


def test_engine_and_simulator_send_the_same() -> None:
    e = experiment(3, 5, compressor=Threshold.usual())
    session = run(e)[0]
    spans = simulate(e.set("pace", 10), real=True).spans
    mine = spans[(spans["rank"] == 0) & (spans.lane == "comm")].sort_values("t0", kind="stable")
    assert [n for _, _, n in session.record.comm()] == mine.nbytes.tolist()


@pytest.mark.parametrize("v", [0, -1, "much", float("nan")])
def test_an_impossible_threshold_raises_knob_error_with_the_range(v: object) -> None:
    with pytest.raises(KnobError, match=r"compressor.of.threshold=.*\[1e-12, 1e\+06\]"):
        experiment(compressor=Threshold.usual()).set("threshold", v)
