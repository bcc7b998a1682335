"""Tests tensor parallelism in which each rank has its own positions of activations between layers."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.agree import crosses_alike, memory_alike, sampled, spans_alike
from tests.piped import seen
from tests.ranks import ended, live, run
from tests.sim.insides import simulated
from tests.split import CONTEXT, LAYERS, PLAN, ROWS, Small, alone, near, small, spread, texts, together
from tests.unit.test_tensor import parts
from workbench import simulate
from workbench.experiment import Experiment
from workbench.optimizers import AdamW
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.settings import Change
from workbench.tasks import ByteGPT, Scatter, Sequence

pytestmark = pytest.mark.ranks
TASK = small(parts=parts)
WAYS = [(2, Tensor(sequence=True)), (4, Tensor(sequence=True)), (3, Tensor(ways=3, sequence=True)),
        (4, Pipeline(micros=2, of=Tensor(sequence=True)))]  # fmt: skip


@pytest.mark.parametrize(("ranks", "way"), [WAYS[0], WAYS[1], WAYS[3]], ids=["2", "2 x 2", "in stages"])
def test_sequence_parallelism_learns_as_one_process_does(ranks: int, way: Partition) -> None:
    e = spread(ranks, task=TASK, partition=way, eval_every=3)
    sessions = run(e)
    near(together(sessions), alone(e, e.replicas))
    plain = run(spread(e.replicas, eval_every=3))
    assert seen(sessions[0], "held_out") == pytest.approx(seen(plain[0], "held_out"), abs=1e-5)


@pytest.mark.parametrize(("ranks", "way"), [WAYS[0], WAYS[3]], ids=["tensor", "in stages"])
def test_the_engine_and_both_simulations_agree(ranks: int, way: Partition) -> None:
    e = spread(ranks, task=TASK, partition=way, eval_every=3, pace=4.0)
    sessions, real, sizes = run(e), simulate(e, real=True), simulate(e)
    for rank, s in enumerate(sessions):
        assert sampled(real, "loss", rank) == seen(s, "loss") and sampled(real, "held_out", rank) == seen(s, "held_out")
    crosses_alike(real, sessions)
    spans_alike(real, sizes)


def test_sequence_parallelism_sends_as_many_bytes_as_without() -> None:
    """A reduce-scatter and an all-gather move the bytes of an all-reduce. In addition, backward gathers the inputs of
    layers by columns again, and sums the gradient of the first block's input.
    """
    task = ByteGPT(layers=3, width=16, heads=2, context=8)
    sent = []
    for sequence in (False, True):
        e = Experiment(task=task, ranks=2, steps=2, eval_every=0, partition=Tensor(sequence=sequence), pace=1.0)
        spans = simulate(e).spans
        mine = spans[(spans["rank"] == 0) & (spans.lane == "comm") & (spans.step == 1)]
        mine = mine[mine.name.str.contains("blocks")]
        again = mine.name.str.contains("again")
        assert again.sum() == (3 * 2 if sequence else 0)
        sent.append(mine[~again].nbytes.sum())
    assert sent[1] == sent[0] + 4 * 8 * 8 * 16 // 2


@pytest.mark.parametrize("way", [Tensor(sequence=True), Pipeline(micros=2, of=Tensor(sequence=True))],
                         ids=["whole", "in stages"])  # fmt: skip
def test_gradients_of_norms_and_biases_are_summed_once_at_the_end_of_backward(way: Partition) -> None:
    """One all-reduce has the bytes of all these gradients, on the engine and both simulations. It is the group's last
    exchange, and their buckets go out last. The test has two replicas, and buckets of a few gradients.
    """
    task, count = ByteGPT(layers=3, width=16, heads=2, context=8), getattr(way, "micros", 1)
    e = Experiment(task=task, ranks=2 * way.size, steps=3, eval_every=0, partition=way, pace=4.0, bucket_mb=0.01)
    sessions, real, sizes = run(e), simulate(e, real=True), simulate(e)
    crosses_alike(real, sessions)
    spans_alike(real, sizes)
    whole = {name: p.numel() for name, p in task.build().model().named_parameters()}
    norms = [n for name, n in whole.items() if "norm" in name or name.endswith("out.bias")]
    assert len(norms) == 3 * 6 + 2
    spans, crossed = sizes.spans[(sizes.spans.lane == "comm") & (sizes.spans.step == 2)], 0
    for rank in range(way.size):
        mine = spans[(spans["rank"] == rank) & spans.name.str.contains(" in tensor ")].sort_values("t0", kind="stable")
        ours = mine[mine.name.str.contains(" gradient partial ")]
        assert len(ours) == count and " gradient partial " in mine.name.iloc[-1]
        crossed += ours.nbytes.sum()
    assert crossed == 2 * count * 4 * sum(norms)
    if count == 1:
        order = [place.name for place in sessions[0].layout.order]
        held = {name for name in order if "norm" in name or name.endswith("out.bias")}
        assert held and set(order[-len(held) :]) == held


def test_a_rank_keeps_less_for_its_backward() -> None:
    """Engine and simulator report the same in every category. Only activations between layers are halved: the inputs of
    norms and of layers by columns, and a mean and a deviation per position.
    """
    task = ByteGPT(layers=4, width=32, context=16, heads=2)
    kept = []
    for sequence in (False, True):
        way = Tensor(sequence=sequence)
        e = Experiment(task=task, ranks=2, steps=5, pace=8.0, bucket_mb=0.05, eval_every=0, partition=way)
        ours = run(e)
        memory_alike(e, ours)
        kept.append(seen(ours[0], "memory activations")[-1])
    positions, layers, norms = 8 * 16, 4, 9
    inputs, told = (4 * layers + 2) * positions * 32, 2 * norms * positions
    assert kept[0] - kept[1] == 4 * (inputs + told) / 2


def test_sequence_parallelism_is_switched_on_and_off_live() -> None:
    e = spread(2, 14, task=TASK, optimizer=AdamW(), lr=1e-2)
    asked = [("partition", Tensor()), ("sequence", True), ("sequence", False), ("sequence", True),
             ("partition", Whole())]  # fmt: skip
    sessions = run(e, *[Change(2 * k + 2, *each) for k, each in enumerate(asked)])
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("partition")) == 5
    first = {p.name: p.param.data for p in sessions[0].layout.order}
    assert all(torch.equal(first[p.name], p.param.data) for s in sessions for p in s.layout.order)


def test_between_layers_each_rank_draws_its_own_random_numbers() -> None:
    """Two ranks have different positions there. Before the first block both have all positions and draw the same."""
    let: dict[tuple[int, str], list[torch.Tensor]] = {}

    class Dropped(Small):
        def __init__(self) -> None:
            super().__init__(dropout=0.5)
            self.first = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(self.words(x) + self.places.weight[: x.shape[1]])
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h))

    def noting() -> nn.Module:
        model = Dropped()
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and not next(model.parameters()).is_meta:
                module.register_forward_hook(partial(note, (id(model), name)))
        return model

    def note(where: tuple[int, str], module: nn.Module, x: Any, y: torch.Tensor) -> None:
        if module.training:
            let.setdefault(where, []).append(y != 0)

    e = spread(2, 3, task=small(model=noting, evaluate=None), partition=Tensor(sequence=True), pace=1.0)
    _, sessions = simulated(e)
    one, two = (id(s.model) for s in sessions)
    for name in {name for _, name in let}:
        for a, b in zip(let[one, name], let[two, name], strict=True):
            assert torch.equal(a, b) if name == "first" else (a != b).float().mean() > 0.3
            assert a.shape[:2] == ((ROWS, CONTEXT) if name in ("first", *INSIDE) else (ROWS, CONTEXT // 2))


INSIDE = [f"blocks.{k}.inside" for k in range(LAYERS)]


def test_a_recomputed_layer_draws_the_same_random_numbers() -> None:
    class Again(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.words(x) + self.places.weight[: x.shape[1]]
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return self.head(self.norm(h))

    e = spread(2, 4, partition=Tensor(sequence=True), pace=1.0)
    (_, kept), (_, again) = (
        simulated(e.set("task", small(model=lambda kind=kind: kind(dropout=0.3), evaluate=None)))
        for kind in (Small, Again)
    )
    for s, t in zip(kept, again, strict=True):
        assert all(torch.equal(p.param.data, q.param.data) for p, q in zip(s.layout.order, t.layout.order, strict=True))


REFUSED = [
    ({name: way for name, way in PLAN.items() if not isinstance(way, Scatter | Sequence)}, 2,
     "sequence=true: the plan has no layer that splits positions first"),
    ({name: way for name, way in PLAN.items() if name != "norm"}, 2,
     "norm.weight would get another gradient than in the whole model"),
    ({name: way for name, way in PLAN.items() if name != "blocks.*.norms.*"}, 2,
     "blocks.0.norms.0.weight would get another gradient than in the whole model"),
    (PLAN, 4, "6 positions cannot be split evenly over 4 ranks; take a sequence length that is a multiple of 4"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "ways", "words"), REFUSED, ids=[words[:30] for *_, words in REFUSED])
def test_an_impossible_plan_is_refused_with_the_reason(plan: Any, ways: int, words: str) -> None:
    way = Tensor(ways=ways, sequence=True)
    sessions = run(spread(ways, 6, task=small(split=lambda _: plan)), Change(3, "partition", way))
    ((*_, refused),) = sessions[0].record.noted("refused")
    assert re.search(re.escape(words), refused) and not sessions[0].record.noted("partition")


def test_a_change_of_sequence_length_ends_the_run_with_a_reason() -> None:
    def longer(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
        some = texts(rank, ranks, seed)
        return [some[0], some[1][:, :-1], *some[2:]]

    sessions = live(spread(2, 6, task=small(data=longer), partition=Tensor(sequence=True)))
    ended(sessions)
    assert any("5 positions cannot be split evenly over 2 ranks" in str(s.error) for s in sessions)
