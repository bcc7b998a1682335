"""Switches from any strategy and partition to any other and back, while ranks train.

A switch fails if replicas differ afterwards or if the hash of the moved state changes. Runs here walk from pair to
pair. All parameters and moments must be bit-identical before and after, and equal on all ranks with the same piece.

The simulator with real tensors tries every ordered pair of partitions, every strategy into and out of every partition,
and 300 seeded random pairs. Real ranks try 40 pairs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.moved import Watch
from tests.ranks import assemble, experiment, make_fitting, run, shipped, toy
from tests.sim.insides import simulated
from tests.thinned import thinned
from workbench.experiment import Experiment
from workbench.host.placement.canonical_state import RankDisagreement
from workbench.host.placement.optimizer_slots import read_slots
from workbench.host.reconfigure.validation import refuses_model
from workbench.host.transfer import repartition
from workbench.optimizers import SGD, AdamW
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.partitions.schedules import GPipe, Interleaved, PipeDream, PipeDream2BW, ZeroBubble
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, SlowMo, Strategy
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks

RANKS, WIDTH, EVERY = 4, 8, 3  # steps between two switches
MANY = 500  # elements to compare before and after the switches of a walk; the whole model
WAYS: list[Partition] = [
    Whole(), Pipeline(micros=2), Pipeline(stages=4, micros=8), Pipeline(micros=4, schedule=GPipe()),
    Pipeline(micros=4, schedule=Interleaved(chunks=2)), Pipeline(micros=2, schedule=Interleaved(chunks=3)),
    Tensor(), Tensor(ways=4), Pipeline(micros=2, of=Tensor()),
    Pipeline(micros=1, schedule=PipeDream()), Pipeline(stages=4, micros=4, schedule=PipeDream2BW()),
    Pipeline(micros=4, schedule=ZeroBubble()), Whole(checkpoint="units"),
]  # fmt: skip
Pair = tuple[Strategy, Partition]


def deep() -> nn.Module:
    """Returns eight layers, including a batch norm, which has buffers."""
    rng = torch.Generator().manual_seed(7)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers[:3], nn.BatchNorm1d(WIDTH), *layers[3:], nn.Linear(WIDTH, 4))
    for p in model.parameters():
        p.data = 0.4 * torch.randn(p.shape, generator=rng)
    return model


def data(rank: int, ranks: int, seed: int) -> list[Any]:
    rng = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(16, WIDTH, generator=rng), torch.randn(16, 4, generator=rng)) for _ in range(4)]


def loss(model: nn.Module, pair: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(pair[0]), pair[1])


def started(pair: Pair, steps: int, **rest: Any) -> Experiment:
    task = toy(model=deep, data=data, loss=loss, evaluate=None)
    more = {"task": task, "lr": 1e-3, "bucket_mb": 0.01, "pace": 2.0, "strategy": pair[0], "partition": pair[1], **rest}
    return experiment(RANKS, steps, **more)


def possible(pair: Pair) -> bool:
    try:
        e = started(pair, 1)
        return refuses_model(e.checked(), deep(), e.task.build()) is None
    except KnobError:
        return False


def every() -> list[Pair]:
    """Returns all strategies that the simulator runs with real tensors, with every partition they support."""
    names = [name for name, cls in shipped(Strategy).items() if not cls.opaque and cls.workers == 1]
    fits = {way.size: [make_fitting(shipped(Strategy)[name], RANKS // way.size) for name in names] for way in WAYS}
    return [(strategy, way) for way in WAYS for strategy in fits[way.size] if possible((strategy, way))]


def switches(pairs: Sequence[Pair]) -> list[Change]:
    """Returns the changes from each pair to the next: knob by knob, or at once if the pair in between is invalid."""
    changes, at = [], 0
    for (was, _), (strategy, way) in pairwise(pairs):
        at += EVERY
        if possible((was, way)):
            changes += [Change(at, "partition", way), Change(at, "strategy", strategy)]
        else:
            changes.append(Change(at, {"strategy": strategy, "partition": way}))
    return changes


def lies_alike(sessions: list[Any], pairs: Sequence[Pair]) -> None:
    """Checks that ranks with the same piece have bit-identical parameters and moments at the end."""
    stages = pairs[-1][1].size
    for s in sessions:
        first = sessions[s.rank.id % stages]
        mine, its = ({place.name: place.param.data for place in each.layout.order} for each in (s, first))
        assert mine.keys() == its.keys()
        assert [name for name in mine if not torch.equal(mine[name], its[name])] == []
        mine, its = (read_slots(each.layout, each.optimizer) for each in (s, first))
        assert mine.keys() == its.keys()
        assert [name for name in mine if not torch.equal(mine[name], its[name])] == []
    held = [(place.name, place.numel) for s in sessions[:stages] for place in s.layout.order]
    numel = Counter({name: sum(n for other, n in held if other == name) for name, _ in held})
    assert numel == {name: p.numel() for name, p in deep().named_parameters()}


def refused(pairs: Sequence[Pair], **rest: Any) -> list[Any]:
    """Simulates a run with real tensors through all of these pairs and finally DDP; returns its refusals."""
    path = [*pairs, (DDP(), pairs[-1][1])]
    changes = switches(path)
    e = started(path[0], changes[-1].at_step + 1, **rest)
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        record, sessions = simulated(e, *changes)
    assert watch.check() > MANY
    lies_alike(sessions, path)
    return list(record.details("refused"))


EVERYWHERE = every()


def test_there_are_many_pairs() -> None:
    assert len(EVERYWHERE) > 70 and {type(s).__name__ for s, _ in EVERYWHERE} >= {"DDP", "ZeRO3", "Gossip", "DiLoCo"}


@pytest.mark.parametrize("optimizer", [AdamW(), SGD()], ids=["AdamW", "SGD"])
def test_every_ordered_pair_of_partitions(optimizer: Any) -> None:
    """One walk visits all edges between them."""
    assert refused([(DDP(), WAYS[k]) for k in walk(len(WAYS))], optimizer=optimizer) == []


def walk(n: int) -> list[int]:
    """Returns a walk from 0 through all ordered pairs of `n`."""
    found, left = [0], {(a, b) for a in range(n) for b in range(n) if a != b}
    while left:
        ahead = [b for a, b in sorted(left) if a == found[-1]]
        found.append(ahead[0] if ahead else min(left)[0])
        left.discard((found[-2], found[-1]))
    return found


@pytest.mark.parametrize(("strategy",), thinned([(DDP(),), (SlowMo(every=2),)], of=0, long=3), ids=str)
def test_every_ordered_pair_with_sequence_parallelism(strategy: Strategy) -> None:
    """Sequence parallelism needs positions, which the model of the other walks lacks."""
    ways = [Whole(), Tensor(), Tensor(sequence=True), Tensor(ways=4, sequence=True), Pipeline(micros=2),
            Pipeline(micros=2, of=Tensor(sequence=True)), Tensor(sequence=True, checkpoint="units")]  # fmt: skip
    task = ByteGPT(layers=2, width=16, heads=4, context=8)
    e = Experiment(task=task, ranks=RANKS, batch=4, pace=2.0, eval_every=0, bucket_mb=0.01, strategy=strategy)
    changes = [Change(EVERY * at, "partition", ways[k]) for at, k in enumerate(walk(len(ways)))][1:]
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        record, _ = simulated(e.set("steps", changes[-1].at_step + 1), *changes)
    assert watch.check() > MANY and not list(record.details("refused"))


@pytest.mark.parametrize(("name",), thinned(((name,) for name in sorted({type(s).__name__ for s, _ in EVERYWHERE})),
                                            of=0, long=30))  # fmt: skip
def test_every_strategy_into_and_out_of_every_partition(name: str) -> None:
    own = [(s, way) for s, way in EVERYWHERE if type(s).__name__ == name]
    others = [(DDP(), way) for way in WAYS]
    assert refused([pair for mine in own for other in others for pair in (mine, other)]) == []


@pytest.mark.parametrize(("seed",), thinned(((seed,) for seed in range(20)), of=0, long=8))
def test_three_hundred_random_pairs(seed: int) -> None:
    rng = random.Random(seed)
    assert refused([rng.choice(EVERYWHERE) for _ in range(16)]) == []


@pytest.mark.parametrize("seed", range(5))
def test_forty_pairs_on_real_ranks(seed: int) -> None:
    rng = random.Random(100 + seed)
    path = [rng.choice(EVERYWHERE) for _ in range(8)]
    path.append((DDP(), path[-1][1]))
    changes = switches(path)
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        sessions = run(started(path[0], changes[-1].at_step + 1, pace=0.0), *changes)
    assert watch.check() > MANY
    assert sessions[0].record.noted("refused") == [], changes
    assemble(sessions)
    lies_alike(sessions, path)


def test_state_corrupted_in_transit_ends_the_run_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips one bit of one element of one moment on one rank."""
    plain = repartition.move_state

    async def spoiled(rank: Any, own: Any, *rest: Any) -> Any:
        given = await plain(rank, own, *rest)
        if rank.id == 0 and (name := next((name for name in sorted(given) if name.startswith("exp_avg/")), "")):
            given[name] = given[name].clone()
            given[name].view(torch.int32)[0] ^= 1
        return given

    monkeypatch.setattr(repartition, "move_state", spoiled)
    with pytest.raises(RankDisagreement, match="the model's state changed while ranks moved it to the new partition"):
        simulated(started((DDP(), Whole()), 6, optimizer=AdamW()), Change(3, "partition", Tensor()))
