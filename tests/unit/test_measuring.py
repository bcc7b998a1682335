"""Tests measurements of compression: the formulas, equal on both hosts, and without effect on training."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, shipped, together, weights
from workbench import Costs, simulate
from workbench.analysis import break_down, break_even
from workbench.compressors import ByteGrad, Cast, Compressor, Dense, ErrorFeedback, PowerSGD, TopK
from workbench.compressors._measured import Measured, lossy
from workbench.experiment import Experiment
from workbench.fabric import traffic
from workbench.host.observe.compression_error import CompressionErrorProbe, is_measurable
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import Change, KnobError, to_plain
from workbench.strategies import DDP, LocalSGD, Strategy

pytestmark = pytest.mark.ranks

NAMES = ("compression_error", "compression_cosine", "residual_ratio")
SPARSE = ErrorFeedback(of=TopK(density=0.1))


def measured(of: Compressor, g: torch.Tensor, memories: list[Memory]) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns one bucket's sum under `of` (shape (n,)) and its measurements. g has shape (ranks, n)."""
    stand_ins = [Measured(of, looks=True) for _ in memories]
    parts = tuple(placed((g.shape[1],)))
    data = [Bucket(0, row.clone(), parts, 0) for row in g]
    ranks = [Rank(r, len(memories)) for r in range(len(memories))]
    together([s.reduce(k, b, m) for s, k, b, m in zip(stand_ins, ranks, data, memories, strict=True)])
    every = [s.found() for s in stand_ins]
    assert all(found == every[0] for found in every), "all ranks find the same"
    return data[0].data, every[0]


def noted(sessions: list[Any]) -> list[tuple[int, str, float]]:
    """Returns (step, name, value) of every measurement; checks that only rank 0 writes them."""
    assert not [s for s in sessions[1:] for row in s.record.samples if row[1] in NAMES]
    return [(step, name, v) for step, name, _, v in sessions[0].record.samples if name in NAMES]


def virtual(e: Experiment, *changes: Change) -> list[tuple[int, str, float]]:
    """Returns the same tuples from a simulation with real tensors."""
    rows = simulate(e.set("pace", 5.0), changes=changes, real=True).samples
    rows = rows[rows.name.isin(NAMES)]
    assert (rows["rank"] == 0).all()
    return list(zip(rows.step.tolist(), rows.name.tolist(), rows.value.tolist(), strict=True))


def steps_of(found: list[tuple[int, str, float]]) -> list[int]:
    return [step for step, name, _ in found if name == NAMES[0]]


@pytest.mark.parametrize("of", [SPARSE, ErrorFeedback(of=ByteGrad(bits=4)), TopK(density=0.2), Cast()], ids=str)
def test_error_cosine_and_residual_match_the_formulas(of: Compressor) -> None:
    rng = torch.Generator().manual_seed(1)
    ours, theirs = [[Memory(r) for r in range(3)] for _ in range(2)]
    for _ in range(4):
        g = torch.randn(3, 400, generator=rng) ** 3
        out, found = measured(of, g, ours)
        assert torch.equal(out.double(), exchange(of, g, placed((400,)), theirs)), "it is the same exchange"
        exact, out = g.double().sum(0), out.double()
        assert found["compression_error"] == pytest.approx(float((out - exact).norm() / exact.norm()), rel=1e-4)
        assert found["compression_cosine"] == pytest.approx(float(out @ exact / out.norm() / exact.norm()), rel=1e-4)
        if not isinstance(of, ErrorFeedback):
            assert "residual_ratio" not in found
            continue
        left = torch.stack([m.buffers["residual"]["p0"].double() for m in ours]).sum(0)
        assert found["residual_ratio"] == pytest.approx(float(left.norm() / exact.norm()), rel=1e-4)


def test_residuals_that_cancel_are_no_loss() -> None:
    g = torch.tensor([[10.0, 1.0], [10.0, -1.0]])
    memories = [Memory(0), Memory(1)]
    _, found = measured(ErrorFeedback(of=TopK(density=0.5)), g, memories)
    assert all(float(m.buffers["residual"]["p0"].norm()) == 1.0 for m in memories)
    assert found == {"compression_error": 0.0, "compression_cosine": 1.0, "residual_ratio": 0.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_zero_and_non_finite_gradients_are_not_measured(bad: float) -> None:
    good, memories = torch.randn(2, 50, generator=torch.Generator().manual_seed(2)), [Memory(0), Memory(1)]
    spoilt = good.clone()
    spoilt[0, 3] = bad
    assert measured(SPARSE, spoilt, memories)[1] == {}
    assert measured(SPARSE, torch.zeros(2, 50), [Memory(0), Memory(1)])[1] == {}
    assert measured(SPARSE, torch.zeros(2, 0), [Memory(0), Memory(1)])[1] == {}
    assert measured(SPARSE, good, memories)[1].keys() == set(NAMES)


def test_buckets_in_16_bits_are_measured_in_32() -> None:
    g = torch.randn(2, 300, generator=torch.Generator().manual_seed(3)).bfloat16()
    out, found = measured(ByteGrad(bits=8), g, [Memory(0), Memory(1)])
    exact = g.double().sum(0)
    assert out.dtype == torch.bfloat16
    assert found["compression_error"] == pytest.approx(float((out.double() - exact).norm() / exact.norm()), rel=1e-4)


@pytest.mark.parametrize("compressor", [SPARSE, ByteGrad(bits=4), ErrorFeedback(of=PowerSGD(rank=2))], ids=str)
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=3)], ids=str)
def test_training_is_bit_identical_with_and_without_measurements(strategy: Strategy, compressor: Compressor) -> None:
    e = experiment(2, 12, strategy=strategy, compressor=compressor)
    without, with_ = run(e), run(e.set("measure_every", 2))
    for a, b in zip(without, with_, strict=True):
        assert a.record.losses() == b.record.losses() and torch.equal(weights(a), weights(b))
        assert sorted(a.record.comm()) == sorted(b.record.comm()), "and so is what is sent, measuring aside"
    assert not noted(without) and noted(with_)


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 9]), (1, [1, 3, 5, 7, 9, 11]), (5, [5, 10]), (0, [])])
def test_every_so_many_steps_are_measured_but_never_two_in_a_row(every: int, steps: list[int]) -> None:
    e = experiment(2, 12, compressor=SPARSE, measure_every=every)
    found = noted(run(e))
    assert steps_of(found) == steps
    assert [row[:2] for row in found] == [(s, name) for s in steps for name in NAMES]


def test_under_local_sgd_at_most_every_second_exchange_is_measured() -> None:
    e = experiment(2, 20, strategy=LocalSGD(every=3), compressor=SPARSE, measure_every=1)
    assert steps_of(noted(run(e))) == [2, 8, 14] == steps_of(virtual(e))


def test_both_hosts_find_the_same_across_live_changes() -> None:
    changes = (
        Change(4, "compressor", "PowerSGD"), Change(7, "bucket_mb", 0.02),
        Change(9, "strategy", {"LocalSGD": {"every": 2}}), Change(14, "compressor", "Dense"),
        Change(17, "compressor", {"ByteGrad": {"bits": 4}}), Change(20, "strategy", "DDP"),
        Change(22, "measure_every", 0), Change(26, "measure_every", 3),
    )  # fmt: skip
    e = experiment(3, 30, compressor=SPARSE, measure_every=1)
    engine, simulated = noted(run(e, *changes)), virtual(e, *changes)
    assert [row[:2] for row in engine] == [row[:2] for row in simulated] and len(engine) > 20
    np.testing.assert_allclose([v for *_, v in engine], [v for *_, v in simulated], rtol=1e-2, atol=1e-4)
    assert not [s for s in steps_of(engine) if 22 <= s < 26] and [s for s in steps_of(engine) if s >= 26]


def test_measurements_have_their_own_lane_for_bytes_and_time() -> None:
    e = experiment(2, 8, compressor=SPARSE, measure_every=4).set("fabric.link.bandwidth", 20.0)
    (session, _) = run(e)
    aside = [r for r in session.record if r[1] == "measuring" and r[6]]
    assert {r[0] for r in aside} == {4}
    dense = sum(traffic("all_reduce", b.nbytes, 2)[0] for b in session.layout.buckets)
    assert sum(r[6] for r in aside) == 2 * dense, "the sum and the residual"
    assert min(r[5] - r[4] for r in aside) > 0
    ports = [(r[0], r[2]) for r in session.record if r[1] == "port"]
    assert sorted(ports) == sorted((step, name) for step, name, _ in session.record.comm())
    spans = simulate(e.set("pace", 5.0), real=True).spans
    spans = spans[(spans["rank"] == 0) & (spans.lane == "measuring")]
    assert set(spans.step) == {4} and spans.nbytes.sum() == 2 * dense


def test_with_sizes_only_nothing_is_measured() -> None:
    spans = simulate(experiment(4, 8, compressor=SPARSE, measure_every=2, pace=5.0), real=False).spans
    assert not (spans.lane == "measuring").any()


def test_one_rank_alone_can_be_measured() -> None:
    e = experiment(1, 6, compressor=SPARSE, measure_every=2)
    assert steps_of(noted(run(e))) == [2, 4] == steps_of(virtual(e))


def test_only_lossy_compressors_of_lockstep_strategies_are_measured() -> None:
    assert not lossy(Dense()) and not lossy(ErrorFeedback(of=Dense()))
    assert lossy(Cast()) and lossy(SPARSE) and lossy(TopK())
    e = experiment(2, 4, compressor=SPARSE, measure_every=2)
    assert is_measurable(e) and not is_measurable(e.set("measure_every", 0))
    assert not is_measurable(e.set("compressor", "Dense"))
    for name, cls in shipped(Strategy).items():
        if cls.lockstep and not cls.in_flight:
            continue
        try:
            assert not is_measurable(e.set("strategy", name)), name
        except KnobError as refusal:
            assert "use " in str(refusal)


def test_measured_costs_do_not_depend_on_compression_measurements() -> None:
    codec = {"ErrorFeedback(TopK)": (3e-7, 1e-7, 2e-7)}
    given = Costs(forward=2e-3, backward=4e-3, update=1e-3, codec=codec, between=5e-4)
    e = experiment(2, 24, compressor=SPARSE).set("fabric.link.bandwidth", 50.0)
    runs = [simulate(e.set("measure_every", every), costs=given, real=True) for every in (0, 2)]
    assert [bool((r.spans.lane == "measuring").any()) for r in runs] == [False, True]
    without, with_ = map(Costs.measured, runs)
    (kind,) = codec
    for costs in (without, with_):
        assert costs.codec[kind] == pytest.approx(codec[kind])
    assert with_.between == pytest.approx(without.between)
    for phase in ("forward", "backward", "update"):
        assert getattr(with_, phase)[0].seconds == pytest.approx(getattr(without, phase)[0].seconds)


@pytest.mark.parametrize("wrong", [-1, 1.5, "often"])
def test_an_impossible_measure_every_raises_knob_error(wrong: object) -> None:
    with pytest.raises(KnobError, match=r"measure_every=.*: must be an integer in \[0, 1e\+06\] steps"):
        experiment(2, 4).set("measure_every", wrong)


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=3)], ids=str)
def test_the_prediction_for_dense_equals_a_dense_run(strategy: Strategy) -> None:
    e = experiment(3, 90, strategy=strategy, compressor=SPARSE, pace=20.0, measure_every=4)
    e = e.set("fabric.link.bandwidth", 5.0)
    found = break_even(simulate(e, real=True))
    alone = simulate(e.set("compressor", "Dense"), real=True)
    every = e.strategy.every if isinstance(e.strategy, LocalSGD) else 1
    exposed = break_down(alone.timeline, 4 - 4 % every, 90 - 90 % every).exposed.mean()
    assert found is not None and (found.known, found.verdict) == ("predicted", "pays")
    assert found.dense == pytest.approx(float(exposed), rel=0.02) and exposed > 1e-3
    both = simulate(e.set("compressor", "Dense"), changes=[Change(42, "compressor", to_plain(SPARSE))], real=True)
    measured = break_even(both)
    assert measured is not None and measured.known == "measured"
    assert measured.dense == pytest.approx(found.dense, rel=0.02)


@pytest.mark.parametrize("names", [(), ("gradient_sent",)], ids=["measured", "weighed"])
def test_a_step_that_fails_leaves_the_rank_its_compressor(names: tuple[str, ...]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Failing(DDP):
        async def step(self, rank: Rank, state: Any) -> None:
            assert rank.compressor is not e.compressor
            raise ConnectionError("Connection closed by peer")

    e = experiment(2, 2, strategy=Failing(), compressor=SPARSE, measure_every=0 if names else 1)
    rank = Rank(0, 2)
    rank.compressor = e.compressor
    run = SimpleNamespace(
        experiment=e, rank=rank, state=None, flushing=False, policy_runner=SimpleNamespace(names=names)
    )
    with pytest.raises(ConnectionError):
        CompressionErrorProbe().measure_step(run).send(None)
    assert rank.compressor is e.compressor
