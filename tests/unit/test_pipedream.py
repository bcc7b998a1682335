"""Compares PipeDream and PipeDream-2BW with weights that one process computes from their definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.agree import memory_alike, spans_alike
from tests.piped import assembled, batches, deep, dream, held_out, loss, piped, same, seen, twice
from tests.ranks import make_fitting, run, shipped, toy
from workbench import simulate
from workbench.experiment import Experiment, partition_rules
from workbench.host.passes.stage_module import cut_batch
from workbench.host.passes.weight_versions import WeightVersion
from workbench.host.placement.stage_cuts import cut_model
from workbench.optimizers import SGD, AdamW, Optimizer
from workbench.partitions import Pipeline, Whole
from workbench.partitions.schedules import OneFOneB
from workbench.settings import Change
from workbench.strategies import DDP, Strategy
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks

Weights = dict[str, torch.Tensor]
OPTIMIZERS = [SGD(momentum=0.0), SGD(momentum=0.9), AdamW()]


def stashed(step: int, stage: int, stages: int) -> int:
    """PipeDream: returns the version of a stage's weights that the minibatch of this step reads."""
    return max(0, step - (stages - 1 - stage))


def delayed(step: int, stage: int, stages: int) -> int:
    """PipeDream-2BW: returns the same for a batch."""
    return max(0, step - 1)


def recurred(e: Experiment, reads: Callable[[int, int, int], int], *phases: int) -> Weights:
    """Computes the weights by the definition: all versions are kept, and each batch is computed whole, in turn.

    phases: steps between which the pipeline is drained
    """
    model, optimizer, replicas = deep(), None, e.ranks // e.partition.size
    stages, micros = e.partition.depth, e.partition.micro_batches
    params = dict(model.named_parameters())
    where = {name: stage for stage, names in enumerate(cut_model(e, model, e.task.build()).names) for name in names}
    optimizer = e.optimizer.make(list(params.values()), e.lr, lambda lr: torch.optim.SGD(params.values(), lr))
    number = 0
    for steps in phases:
        versions: list[Weights] = []
        for step in range(steps):
            versions.append({name: p.detach().clone() for name, p in params.items()})
            sums: list[Weights] = []
            for replica in range(replicas):
                old = {name: versions[reads(step, stage, stages)][name].clone().requires_grad_()
                       for name, stage in where.items()}  # fmt: skip
                for x, y in cut_batch(batches(replica, replicas, 0)[number % 8], micros):
                    made = nn.functional.mse_loss(functional_call(model, old, (x,)), y)
                    made.backward(torch.tensor(1.0 / micros))
                sums.append({name: x.grad for name, x in old.items()})
            for name, p in params.items():
                first, *others = (each[name] for each in sums)
                p.grad = sum(others, first) / replicas if replicas > 1 else first
            optimizer.step()
            number += 1
    return params


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_pipedream_is_bit_equal_to_its_definition(optimizer: Optimizer, ranks: int, stages: int) -> None:
    e = piped(ranks, 10, partition=dream(stages), optimizer=optimizer)
    sessions = run(e)
    want = recurred(e, stashed, 10)
    same(sessions, stages, want)
    assert [seen(s, "loss") for s in sessions[:stages]] == [seen(sessions[0], "loss")] * stages


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(("ranks", "stages", "micros"), [(2, 2, 4), (2, 2, 2), (3, 3, 4), (4, 4, 8), (4, 2, 4)])
def test_2bw_is_bit_equal_to_its_definition(optimizer: Optimizer, ranks: int, stages: int, micros: int) -> None:
    e = piped(ranks, 10, partition=twice(stages, micros), optimizer=optimizer)
    same(run(e), stages, recurred(e, delayed, 10))


def far(one: Weights, other: Weights) -> float:
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def test_the_reference_differs_from_a_flush_and_from_other_delays() -> None:
    """So the tests above can fail: with versions of other stages, one delay for all, or no staleness."""
    e = piped(3, partition=dream(3))
    want = recurred(e, stashed, 10)
    for other in (delayed, lambda step, stage, stages: step, lambda step, stage, stages: max(0, step - stages + 1)):
        assert far(want, recurred(e, other, 10)) > 1e-3


def test_without_stashing_the_weights_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward with newer weights than its forward is the case that the stash prevents."""
    e = piped(2, 10, partition=dream(2))
    with monkeypatch.context() as patch:
        patch.setattr(WeightVersion, "copy_weights", lambda version: None)
        without = assembled(run(e), 2)
    assert far(recurred(e, stashed, 10), without) > 1e-3


def said(x: Any) -> str:
    return f"{type(x.schedule).__name__}-{x.stages}" if isinstance(x, Pipeline) else x.__name__


BOTH = [(dream(2), stashed), (twice(2, 4), delayed)]
DEEPER = [(dream(4), stashed), (twice(4, 4), delayed)]


@pytest.mark.parametrize(("way", "reads"), BOTH + DEEPER, ids=said)
def test_the_pipeline_drains_before_a_change_and_no_batch_is_lost(way: Pipeline, reads: Any) -> None:
    """Switches to a flush and back, and drains in between for a change of bucket size."""
    e = piped(way.stages, 18, partition=way)
    changes = [Change(5, "bucket_mb", 0.02), Change(10, "schedule", OneFOneB()), Change(14, "schedule", way.schedule)]
    sessions = run(e, *changes)
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("change")) == 3
    same(sessions, way.stages, recurred(e, reads, 5, 5, *[1] * 4, 4))


@pytest.mark.parametrize(("way", "reads"), BOTH + DEEPER, ids=said)
def test_no_more_batches_are_drawn_than_there_are_steps(way: Pipeline, reads: Any) -> None:
    """The data ends with the run and can be read once: forwards do not run ahead of the last step."""

    def once(rank: int, ranks: int, seed: int) -> Any:
        every = batches(rank, ranks, seed)
        return (every[number % len(every)] for number in range(10))

    e = piped(way.stages, 10, partition=way)
    short = replace(e, task=toy(model=deep, data=once, evaluate=held_out, loss=loss))
    changes = [Change(8, "bucket_mb", 0.02)]
    sessions = run(short, *changes)
    assert [s.phase for s in sessions] == ["done"] * way.stages
    same(sessions, way.stages, recurred(e, reads, 8, 2))
    assert simulate(replace(short, pace=4.0), changes=changes, real=True).state == "done"


@pytest.mark.parametrize(("way", "reads"), BOTH, ids=said)
def test_a_held_out_loss_disturbs_nothing(way: Pipeline, reads: Any) -> None:
    e = piped(2, 8, partition=way, eval_every=2)
    sessions = run(e)
    same(sessions, 2, recurred(e, reads, 8))
    assert len(seen(sessions[0], "held_out")) == 5
    model = deep()
    model.load_state_dict({name: x.detach() for name, x in recurred(e, reads, 8).items()})
    with torch.no_grad():
        assert seen(sessions[0], "held_out")[-1] == held_out(model), "of the newest weights"


@pytest.mark.parametrize("way", [*(w for w, _ in BOTH), *(w for w, _ in DEEPER)], ids=said)
def test_engine_and_simulator_are_bit_identical(way: Pipeline) -> None:
    e = piped(4, 14, eval_every=3, pace=4.0, partition=way)
    changes = [Change(6, "lr", 2e-3), Change(9, "schedule", OneFOneB()), Change(11, "schedule", way.schedule)]
    sessions = run(e, *changes)
    assert not sessions[0].record.noted("refused")
    simulated = simulate(e, changes=changes, real=True)
    rows = simulated.timeline.samples.rows()
    for name in ("loss", "held_out"):
        for rank in range(4):
            mine = rows.value[rows.equal("name", name) & (rows.rank == rank)].tolist()
            assert mine == seen(sessions[rank], name), (name, rank)
    spans_alike(simulated, simulate(e, changes=changes))


@pytest.mark.parametrize("way", [*(w for w, _ in BOTH), *(w for w, _ in DEEPER)], ids=said)
def test_stashed_weights_are_in_the_memory_report(way: Pipeline) -> None:
    """The ledger counts p-i versions of stage i's weights (or two) on both hosts and with sizes only, and fewer at the
    end.
    """
    task = ByteGPT(layers=6, width=32, context=16, heads=2)
    e = Experiment(task=task, ranks=way.stages, steps=8, pace=8.0, bucket_mb=0.05, eval_every=0, batch=8, partition=way)
    sessions = run(e)
    memory_alike(e, sessions)
    flushed = run(e.set("schedule", OneFOneB()))
    for stage, (s, plain) in enumerate(zip(sessions, flushed, strict=True)):
        versions = 2 if way.schedule.delayed else way.stages - stage
        assert max(seen(s, "memory parameters")) == versions * s.training.layout.byte_count, stage
        assert seen(plain, "memory parameters")[-1] == s.training.layout.byte_count
        assert not s.training.micros_in_flight.versions.kept, "the run has ended, and drained"
    if way.micros == 1:  # more minibatches are in flight than the one of a flush
        kept = [[max(seen(s, "memory activations")) for s in each] for each in (sessions, flushed)]
        assert kept[0] == [(way.stages - stage) * one for stage, one in enumerate(kept[1])]


EVERY = [
    name
    for name, cls in shipped(Strategy).items()
    if partition_rules.explain_refusal(replace(piped(4, partition=dream(2)), strategy=make_fitting(cls, 2))) is None
]


def test_at_least_15_strategies_support_these_pipelines() -> None:
    assert len(EVERY) >= 15 and {"DDP", "LocalSGD", "DiLoCo", "StreamingDiLoCo", "SlowMo", "Gossip"} <= set(EVERY)


@pytest.mark.parametrize("way", [dream(2), twice(2, 2)], ids=["PipeDream", "2BW"])
@pytest.mark.parametrize("name", EVERY)
def test_every_strategy_does_the_same_on_both_hosts_and_can_be_switched_off(name: str, way: Pipeline) -> None:
    """Between two replicas of two stages, drained into a flush and back. Under DDP the replicas finally agree."""
    e = piped(4, 18, strategy=make_fitting(shipped(Strategy)[name], 2), partition=way, pace=1.0)
    changes = [Change(7, "schedule", OneFOneB()), Change(10, "schedule", way.schedule), Change(16, "strategy", DDP())]
    sessions = run(e, *changes)
    assert not sessions[0].record.noted("refused")
    first, second = (assembled(sessions, 2, replica) for replica in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    rows = simulate(e, changes=changes, real=True).timeline.samples.rows()
    for rank in range(4):
        mine = rows.value[rows.equal("name", "loss") & (rows.rank == rank)].tolist()
        assert mine == pytest.approx(seen(sessions[rank], "loss"), rel=1e-5)


@pytest.mark.parametrize(("way", "reads"), [(dream(2), stashed), (twice(2, 4), delayed)], ids=["PipeDream", "2BW"])
def test_recomputed_layers_use_the_weights_of_their_forward(way: Pipeline, reads: Any) -> None:
    e = piped(2, 8, partition=replace(way, of=Whole(checkpoint="units")))
    same(run(e), 2, recurred(e, reads, 8))
