"""Switches from shards to stages or slices and back by one change, without the whole model on any rank.

The resulting state is bit-identical to a switch through DDP on whole replicas, which takes two or three changes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run, toy
from tests.sim.insides import simulated
from tests.split import small, spread
from tests.unit.test_tensor import parts
from workbench import simulate
from workbench.compressors import ErrorFeedback, TopK
from workbench.experiment import Experiment
from workbench.host.memory.budget import OutOfMemory
from workbench.host.placement.optimizer_slots import read_slots
from workbench.optimizers import SGD, AdamW
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.run import require_memory
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, HSDP, DiLoCo, LocalSGD, Strategy, ZeRO1, ZeRO3, ZeROInfinity, ZeROOffload

pytestmark = pytest.mark.ranks
EVERY = 3  # steps between two switches
WIDTH = 48
Pair = tuple[Strategy, Partition]
STAGES, SLICES, BOTH = Pipeline(micros=2), Tensor(), Pipeline(of=Tensor(), micros=2)
WALKS: dict[str, list[Pair]] = {
    "ZeRO3 and stages": [(ZeRO3(), Whole()), (DDP(), STAGES), (ZeRO3(), Whole())],
    "HSDP and slices": [(HSDP(), Whole()), (DDP(), SLICES), (HSDP(), Whole())],
    "ZeRO1 and both": [(ZeRO1(), Whole()), (LocalSGD(every=2), BOTH), (ZeRO1(), Whole())],
    "an outer momentum": [(DiLoCo(every=2), STAGES), (ZeRO3(), Whole()), (DiLoCo(every=2), SLICES)],
    "on disk": [(DDP(), STAGES), (ZeROInfinity(), Whole()), (DDP(), SLICES)],
    "on the host": [(DDP(), SLICES), (ZeROOffload(), Whole()), (DDP(), STAGES)],
}


def started(pair: Pair, walk: list[Pair], **rest: Any) -> Experiment:
    known = {"task": small(parts=parts, evaluate=None), "optimizer": AdamW(), "lr": 1e-2, "pace": 2.0}
    return spread(4, EVERY * len(walk), **{**known, "strategy": pair[0], "partition": pair[1], **rest})


def at_once(walk: list[Pair]) -> list[Change]:
    return [Change(EVERY * k, {"strategy": s, "partition": way}) for k, (s, way) in enumerate(walk) if k]


def by_whole_replicas(walk: list[Pair]) -> list[Change]:
    """Returns the changes of the same walk through DDP on whole replicas."""
    found = []
    for k, (was, (strategy, way)) in enumerate(pairwise(walk), 1):
        steps: list[tuple[str, Any]] = [("partition", way), ("strategy", strategy)]
        found += [Change(EVERY * k, *step) for step in ([("strategy", DDP()), *steps] if was[0].shards else steps)]
    return found


def held(session: Any) -> dict[str, torch.Tensor]:
    """Returns all state of a rank: parameters, optimizer state and compressor state."""
    found = {f"bucket {index}": w for index, w in enumerate(session.layout.weights)}
    found |= read_slots(session.layout, getattr(session, "training", session).optimizer)
    return found | {f"{kind} {name}": x for kind, of in session.rank.memory.buffers.items() for name, x in of.items()}


def alike(mine: list[Any], its: list[Any]) -> bool:
    """Whether each rank has bit-identical state in the same order of parameters."""
    for one, other in zip(mine, its, strict=True):
        assert [place.name for place in one.layout.order] == [place.name for place in other.layout.order]
        here, there = held(one), held(other)
        assert here.keys() == there.keys() and len(here) > 10
        assert [name for name, x in here.items() if not torch.equal(x, there[name])] == []
    return True


@pytest.mark.parametrize("name", WALKS)
def test_in_the_simulator_one_change_is_bit_identical_to_several(name: str) -> None:
    walk = WALKS[name]
    record, mine = simulated(started(walk[0], walk), *at_once(walk))
    other, its = simulated(started(walk[0], walk), *by_whole_replicas(walk))
    assert len(record.changes) == 2 and len(other.changes) == 5 and alike(mine, its)


@pytest.mark.parametrize("name", list(WALKS)[:3])
def test_on_real_ranks_one_change_is_bit_identical_to_several(name: str) -> None:
    walk = WALKS[name]
    mine, its = (run(started(walk[0], walk, pace=0.0), *made(walk)) for made in (at_once, by_whole_replicas))
    assert len(mine[0].record.noted("change")) == 2 and alike(mine, its)


def test_the_residual_moves_along() -> None:
    walk = WALKS["ZeRO3 and stages"]
    e = started(walk[0], walk, compressor=ErrorFeedback(of=TopK(density=0.05)), optimizer=SGD())
    (_, mine), (_, its) = (simulated(e, *made(walk)) for made in (at_once, by_whole_replicas))
    assert alike(mine, its) and all("residual" in " ".join(held(s)) for s in mine)


def peaks(record: Any) -> list[float]:
    rows = record.timeline.samples.rows()
    return list(rows.value[rows.equal("name", "memory peak")])


def deep() -> nn.Module:
    rng, model = torch.Generator().manual_seed(3), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    for p in model.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=rng)
    return model


def ones(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    return [torch.ones(4, WIDTH)]


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("back", [False, True])
def test_a_switch_fits_into_a_memory_budget_below_the_whole_model(back: bool) -> None:
    """The budget is less than 75 % of the model with Adam's state, which together are three times the model."""
    walk = [(ZeRO3(outstanding=1), Whole()), (DDP(), Pipeline(stages=4, micros=4))][:: -1 if back else 1]
    task, whole = toy(model=deep, data=ones, loss=square, evaluate=None), 3 * 8 * WIDTH * (WIDTH + 1) * 4
    e = started(walk[0], walk, task=task, memory_mb=0.74 * whole / 1e6, lr=1e-4, bucket_mb=0.01)
    (change,), way = at_once(walk), by_whole_replicas(walk)
    require_memory(e, change.path, change.value)
    with pytest.raises(KnobError, match=r"rank \d needs"):
        require_memory(e, way[0].path, way[0].value)
    with pytest.raises(OutOfMemory, match=r"rank \d needs"):
        simulate(e, changes=way)
    assert simulate(e, changes=[change]).state == "done"
    run(e, change)


def test_after_a_switch_a_rank_only_holds_its_stages_parameters() -> None:
    """This also holds through whole replicas, where ZeRO3's count must end."""
    walk = WALKS["ZeRO3 and stages"][:2]
    began = simulate(started(walk[1], walk), real=False)
    for made in (at_once, by_whole_replicas):
        assert peaks(simulate(started(walk[0], walk), changes=made(walk), real=False))[-1] == max(peaks(began))
