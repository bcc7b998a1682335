"""Tests pipeline stages of several ranks that compute their layers together: Pipeline(of=Tensor())."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.agree import crosses_alike, memory_alike, sampled, spans_alike
from tests.piped import seen
from tests.ranks import experiment, make_fitting, net, run, shipped, toy
from tests.split import alone, near, small, spread, together
from tests.unit.test_tensor import parts
from workbench import simulate
from workbench.compressors import Cast, ErrorFeedback, TopK
from workbench.experiment import Experiment, partition_rules
from workbench.optimizers import AdamW
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.partitions.schedules import GPipe, Interleaved
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, Strategy
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks
TASK = small(parts=parts)
WAYS = [Pipeline(micros=2, of=Tensor()), Pipeline(micros=2, of=Tensor(), schedule=Interleaved(chunks=2)),
        Pipeline(micros=4, of=Tensor(), schedule=GPipe())]  # fmt: skip


def both(ranks: int, way: Partition, **rest: Any) -> Experiment:
    return spread(ranks, **{"task": TASK, "partition": way, **rest})


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{type(way.schedule).__name__} {way.micros}")
def test_four_ranks_learn_as_one_rank_does(way: Pipeline) -> None:
    sessions = run(both(4, way, eval_every=3))
    near(together(sessions), alone(both(4, way), 1))
    (plain,) = run(spread(1, eval_every=3))
    assert seen(sessions[0], "held_out") == pytest.approx(seen(plain, "held_out"), abs=1e-5)
    assert [seen(s, "loss") for s in sessions] == [seen(sessions[0], "loss")] * 4


@pytest.mark.parametrize("way", WAYS[:2], ids=["1F1B", "interleaved"])
def test_the_engine_and_both_simulations_agree_on_losses_and_bytes(way: Pipeline) -> None:
    e = both(4, way, pace=4.0, eval_every=3)
    sessions, real, sizes = run(e), simulate(e, real=True), simulate(e)
    for rank, s in enumerate(sessions):
        assert sampled(real, "loss", rank) == seen(s, "loss") and sampled(real, "held_out", rank) == seen(s, "held_out")
    crosses_alike(real, sessions)
    spans_alike(real, sizes)


def test_eight_virtual_ranks_make_two_replicas_of_two_stages_of_two_ranks() -> None:
    e = both(8, WAYS[0], pace=4.0, eval_every=3)
    real, sizes = simulate(e, real=True), simulate(e)
    plain = simulate(spread(2, pace=4.0, eval_every=3), real=True)
    assert sampled(real, "held_out", 0) == pytest.approx(sampled(plain, "held_out", 0), abs=1e-5)
    assert real.spans.t1.max() == sizes.spans.t1.max()


def test_both_hosts_report_the_same_memory() -> None:
    task = ByteGPT(layers=4, width=32, context=16, heads=2)
    way = Pipeline(micros=4, of=Tensor())
    e = Experiment(task=task, ranks=4, steps=5, pace=8.0, bucket_mb=0.05, eval_every=0, partition=way)
    ours = run(e)
    memory_alike(e, ours)


def test_it_is_switched_live_to_every_partition_and_back() -> None:
    ways: list[Partition] = [WAYS[0], Tensor(ways=4), WAYS[1], Pipeline(micros=2), Tensor(), WAYS[2], Whole()]
    changes = [Change(2 * k + 2, "partition", way) for k, way in enumerate(ways)]
    sessions = run(spread(4, 17, task=TASK, optimizer=AdamW(), lr=1e-2), *changes)
    assert not sessions[0].record.noted("refused")
    marks = [json.loads(m[3]) for m in sessions[0].record.noted("partition")]
    assert [(m["stages"], m["slices"]) for m in marks] == [(2, 2), (1, 4), (2, 2), (2, 1), (1, 2), (2, 2), (1, 1)]
    first = {p.name: p.param.data for p in sessions[0].layout.order}
    assert all(torch.equal(first[p.name], p.param.data) for s in sessions for p in s.layout.order)


def test_a_replica_is_clipped_as_a_whole() -> None:
    sessions = run(e := both(4, WAYS[0], clip=0.5))
    near(together(sessions), alone(e, 1))
    assert max(seen(sessions[0], "grad_norm")) > 0.5


def test_activations_and_gradients_between_such_stages_can_be_compressed() -> None:
    """One codec is between stages, another between replicas. Ranks with the same part of a stage get the same."""
    way = Pipeline(micros=2, of=Tensor(), activations=Cast(to="bf16"), gradients=Cast(to="bf16"))
    e = both(8, way, compressor=ErrorFeedback(of=TopK(density=0.2)), pace=4.0)
    real, plain = simulate(e, real=True), simulate(both(8, WAYS[0], pace=4.0), real=True)
    sent = [r.spans[r.spans.name.str.contains("send activation")].nbytes.sum() for r in (real, plain)]
    assert sent[0] * 2 == sent[1]
    losses = [sampled(real, "loss", rank) for rank in range(4)]
    assert losses == [losses[0]] * 4


SOME = [name for name, cls in shipped(Strategy).items()
        if not partition_rules.explain_refusal(replace(both(8, WAYS[0]), strategy=make_fitting(cls, 2)))]  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_every_strategy_that_supports_pipelines_supports_these(name: str) -> None:
    """In the simulator two replicas train under the strategy, and are equal after a switch to DDP."""
    strategy = make_fitting(shipped(Strategy)[name], 2)
    e = both(8, WAYS[0], strategy=strategy, steps=6, pace=4.0)
    turned = simulate(e, changes=[Change(4, "strategy", DDP()), Change(5, "partition", Whole())], real=True)
    assert not turned.details("refused") and len(turned.details("partition")) == 2


def test_a_slice_without_parameters_to_train_is_refused_and_the_run_goes_on() -> None:
    """The last layer is whole on both ranks of its stage, and one rank owns all of it."""

    def layers() -> nn.Module:
        return net(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4, bias=False)))

    e, barren = experiment(4, 6, task=toy(model=layers), pace=2.0), Pipeline(micros=2, of=Tensor(), cuts=(2,))
    with pytest.raises(KnobError, match=r"slice 1 of 2 of stage 1 would have no parameters to train.*take other cuts"):
        simulate(e.set("partition", barren))
    sessions = run(e, Change(3, "partition", barren))
    assert "slice 1 of 2 of stage 1 would have no parameters to train" in sessions[0].record.noted("refused")[0][3]
    assert {s.phase for s in sessions} == {"done"}
