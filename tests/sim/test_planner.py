"""Checks that the planner lists the choices that fit, fastest first, with the simulator's values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from workbench import Costs, KnobError, plan, simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.optimizers import AdamW
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.run import require_memory
from workbench.strategies import DDP, LocalSGD, ZeRO3, ZeROInfinity, ZeROOffload
from workbench.tasks import ByteGPT, Task

pytestmark = pytest.mark.ranks

E = Experiment(task=ByteGPT(layers=4), ranks=4, optimizer=AdamW(), batch=2, pace=60.0, bucket_mb=0.5,
               fabric=Fabric(link=Link(bandwidth=2000.0), host=2.0, disk=0.5))  # fmt: skip
FEW = {"strategies": [DDP(), ZeRO3(), ZeROInfinity()], "partitions": [Whole(), Pipeline(stages=2, micros=4), Tensor()]}


def test_each_row_equals_its_own_simulation_with_the_same_global_batch() -> None:
    rows = plan(E, **FEW)
    assert [row.step_s for row in rows] == sorted(row.step_s for row in rows)
    pairs = {(type(row.strategy), type(row.partition)) for row in rows}
    assert pairs == {(DDP, Whole), (DDP, Pipeline), (DDP, Tensor), (ZeRO3, Whole), (ZeROInfinity, Whole)}
    for row in rows:
        n = row.partition.size
        e = replace(E, strategy=row.strategy, partition=row.partition, batch=2 * n, pace=60.0 * n)
        found = simulate(replace(e, steps=8, eval_every=0)).summary()
        assert row.step_s == pytest.approx(found["step_s"], rel=0.02)
        assert row.peak == found["memory_peak"]


def test_a_lab_accepts_every_row_of_the_plan() -> None:
    """This includes memory for an evaluation and for buckets with a late exchange."""
    e = Experiment(task=ByteGPT(layers=6), ranks=2, memory_mb=16, batch=2, pace=60.0)
    strategies = [ZeRO3(), ZeROOffload(), ZeROInfinity()]
    rows = plan(e, strategies=strategies, partitions=[Whole(), Whole(checkpoint="units")])
    assert rows
    for row in rows:
        require_memory(e.set({"strategy": row.strategy, "partition": row.partition}))


def test_the_plan_has_only_the_rows_that_fit_into_memory() -> None:
    every = plan(E, **FEW)
    limit = sorted(row.peak for row in every)[1] / 1e6 + 0.5
    fitting = plan(replace(E, memory_mb=limit), **FEW)
    assert 0 < len(fitting) < len(every) and all(row.peak <= 1e6 * limit for row in fitting)
    assert {repr(row) for row in fitting} < {repr(row) for row in every}


def test_by_default_the_plan_has_all_exact_strategies_and_the_current_one() -> None:
    rows = plan(replace(E, ranks=2, strategy=LocalSGD(every=4)), partitions=[Whole()])
    names = {type(row.strategy).__name__ for row in rows}
    assert {"DDP", "ZeRO1", "ZeRO2", "ZeRO3", "ZeROOffload", "ZeROInfinity", "LocalSGD"} <= names
    said = next(repr(row) for row in rows if row.strategy == LocalSGD(every=4))
    assert said.startswith("LocalSGD(every=4), Whole(): ")


def test_a_slow_wire_between_ranks_wants_fewer_bytes() -> None:
    """Tensor parallelism sends each layer's activations, which grow with the batch; gradients do not."""
    ways = {"strategies": [DDP()], "partitions": [Whole(), Tensor(ways=4)]}
    slow, fast = (plan(replace(E, batch=16).set("fabric.link.bandwidth", rate), **ways) for rate in (200.0, 1e5))
    assert slow[-1].partition == Tensor(ways=4) and slow[-1].step_s > 2 * slow[0].step_s
    assert fast[-1].step_s < 1.3 * fast[0].step_s


def test_a_plan_without_pace_or_costs_raises_knob_error() -> None:
    with pytest.raises(KnobError, match="pace=0: the duration of compute is unknown"):
        plan(replace(E, pace=0.0))


def test_a_plan_applies_costs_as_a_simulation_does_and_excludes_the_first_steps() -> None:
    e = replace(E, pace=0.0, ranks=2, fabric=Fabric(host=0.5))
    costs = Costs(forward=0.001, backward=0.002, update=0.007)
    whole = {"strategies": [DDP()], "partitions": [Whole()]}
    assert plan(e, costs=costs, **whole)[0].step_s == pytest.approx(0.010, rel=0.01)
    late = [ZeROOffload(), ZeROOffload(delayed=True, delay_from=20)]
    plain, delayed = (plan(e, costs=costs, strategies=[s], partitions=[Whole()])[0].step_s for s in late)
    assert delayed < 0.95 * plain
    assert plan(e, costs=costs, strategies=[LocalSGD(every=10)], partitions=[Whole()])[0].sent > 0


def test_an_impossible_pair_does_not_prevent_a_plan_of_the_other_pairs() -> None:
    slow = replace(E, pace=40_000.0, batch=30_000)
    ways = [type(row.partition) for row in plan(slow, strategies=[DDP()], partitions=[Whole(), Tensor(ways=4)])]
    assert ways == [Whole]


def test_a_pure_task_has_the_same_plan_and_is_built_less_often() -> None:
    made: list[int] = []

    def model() -> nn.Module:
        made.append(1)
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def rows(pure: bool) -> list[tuple[Any, ...]]:
        made.clear()
        task = Task(model=model, data=lambda rank, ranks, seed, batch: [torch.ones(batch, 16)], pure=pure,
                    loss=lambda m, x: m(x).square().mean(),
                    optimizer=lambda params: torch.optim.AdamW(params, 1e-3))  # fmt: skip
        return [tuple(row) for row in plan(replace(E, task=task, bucket_mb=0.01))]

    asked, known = ((rows(pure), len(made)) for pure in (False, True))
    assert asked[0] == known[0] and len(asked[0]) > 5 and known[1] < asked[1]
