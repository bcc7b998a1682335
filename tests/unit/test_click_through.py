"""Tests ClickThrough: sparse gradients, a known best loss, and shards by id."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from workbench import simulate
from workbench.compressors import Dense, Zen
from workbench.experiment import Experiment
from workbench.tasks import ClickThrough, TaskError
from workbench.tasks._clicks import auc
from workbench.tasks.click_through import held_out, planted, shard_ids

SMALL = ClickThrough(fields=3, ids=200, numbers=2, width=4, hidden=8)


class KnowsTheWorld(nn.Module):
    """The planted model with a factor on its log odds and an offset."""

    def __init__(self, task: ClickThrough, factor: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.world, self.factor, self.offset = planted(task._about), factor, offset
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.factor * torch.logit(self.world.chance(ids, numbers).double()) + self.offset


@pytest.mark.parametrize("task", [ClickThrough(), SMALL, ClickThrough(skew=0.0, world=3)], ids=str)
def test_only_the_planted_model_reaches_the_entropy(task: ClickThrough) -> None:
    evaluate = task.build().evaluate
    best = evaluate(KnowsTheWorld(task))
    assert best["loss"] == pytest.approx(best["entropy"], abs=1e-6)
    for factor, offset in ((0.9, 0.0), (1.1, 0.0), (1.0, 0.1), (1.0, -0.1), (0.0, 0.0)):
        other = evaluate(KnowsTheWorld(task, factor, offset))
        assert other["loss"] > best["loss"] + 1e-4 and other["entropy"] == best["entropy"]
    assert evaluate(KnowsTheWorld(task, 0.0))["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert best["auc"] > 0.6 and evaluate(KnowsTheWorld(task, 0.0))["auc"] == 0.5


def test_the_normalised_entropy_is_one_for_a_constant_rate(task: ClickThrough = SMALL) -> None:
    evaluate = task.build().evaluate
    rate = held_out(task._about).chance.double().mean()
    assert evaluate(KnowsTheWorld(task, 0.0, float(torch.logit(rate))))["normalised entropy"] == pytest.approx(1.0)
    assert evaluate(KnowsTheWorld(task, 0.0, 0.0))["normalised entropy"] > 1.0
    assert evaluate(KnowsTheWorld(task))["normalised entropy"] < 0.95


def test_the_planted_models_loss_on_drawn_clicks_is_its_entropy_up_to_chance() -> None:
    held = held_out(ClickThrough()._about)
    cost = F.binary_cross_entropy(held.chance, held.clicked, reduction="none").double()
    assert abs(float(cost.mean()) - held.entropy) < 4 * float(cost.std()) / len(cost) ** 0.5
    odds = torch.logit(held.chance)
    assert 1.2 < float(odds.std()) < 2.0 and 0.2 < float(held.clicked.mean()) < 0.5


def trained(task: ClickThrough, steps: int, ranks: int = 4) -> dict[str, float]:
    torch.manual_seed(0)
    learner = task.build()
    model = learner.model()
    optimizer = learner.optimizer(model.parameters(), task.lr)
    streams = [learner.data(rank, ranks, task.batch, 0) for rank in range(ranks)]
    for _ in range(steps):
        for stream in streams:
            (learner.loss(model, next(stream)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return learner.evaluate(model)


def test_training_begins_at_log_2_and_beats_the_best_constant_after_60_steps() -> None:
    learner = ClickThrough().build()
    before = learner.evaluate(learner.model())
    assert before["loss"] == pytest.approx(0.6931, abs=1e-4) and before["auc"] == 0.5
    rate = held_out(ClickThrough()._about).chance.mean()
    constant = float(F.binary_cross_entropy(rate, rate))
    after = trained(ClickThrough(), 60)
    assert before["entropy"] < after["loss"] < constant - 0.01 and after["auc"] > 0.65


def test_a_batchs_gradient_is_zero_outside_its_rows() -> None:
    learner = ClickThrough().build()
    model = learner.model()
    nn.init.normal_(model.head.weight)
    batch = next(iter(learner.data(0, 4, 64, 0)))
    learner.loss(model, batch).backward()
    for f, table in enumerate(model.tables):
        assert table.weight.grad.layout == torch.strided
        rows = table.weight.grad.abs().sum(1).nonzero().flatten()
        assert torch.equal(rows, batch[0][:, f].unique()) and len(rows) <= 64


def test_ids_follow_their_power_law() -> None:
    task = ClickThrough(ids=50, skew=1.1)
    ids = next(iter(task.build().data(0, 1, 20_000, 0)))[0]
    want = torch.arange(1, 51, dtype=torch.float64) ** -1.1
    want /= want.sum()
    for f in range(task.fields):
        got = torch.bincount(ids[:, f], minlength=50) / 20_000
        assert float(((got - want).abs() / (want * (1 - want) / 20_000).sqrt()).max()) < 5


def taken(task: ClickThrough, *where: int) -> list[torch.Tensor]:
    return [torch.cat([x.double().reshape(-1) for x in batch]) for batch in islice(task.build().data(*where), 3)]


def test_batches_depend_only_on_rank_and_seed_and_differ_between_ranks() -> None:
    first, again = taken(SMALL, 0, 4, 16, 0), taken(SMALL, 0, 4, 16, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (taken(SMALL, 1, 4, 16, 0), taken(SMALL, 0, 4, 16, 1)):
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1])


def test_with_shards_ranks_share_no_first_id_and_all_other_ids() -> None:
    task = ClickThrough(fields=2, ids=500, shards="ids")
    seen = [next(iter(task.build().data(rank, 4, 20_000, 0)))[0] for rank in range(4)]
    firsts = [set(ids[:, 0].tolist()) for ids in seen]
    assert not any(firsts[i] & firsts[j] for i in range(4) for j in range(i))
    assert len(set().union(*firsts)) > 490
    assert all(len(set(ids[:, 1].tolist())) > 450 for ids in seen)


def test_ids_are_dealt_out_completely_with_even_frequencies() -> None:
    frequency = planted(ClickThrough()._about).frequency
    shares = [shard_ids(frequency, 4, rank) for rank in range(4)]
    assert torch.equal(torch.stack(shares).sum(0), frequency)
    assert all(float(share.sum()) == pytest.approx(0.25, abs=1e-3) for share in shares)
    with pytest.raises(TaskError, match="ids=3: too few for 4 ranks; take at most 3 ranks or shards='iid'"):
        next(iter(ClickThrough(ids=3, shards="ids").build().data(0, 4, 8, 0)))


def test_a_step_and_an_evaluation_are_quick() -> None:
    task = ClickThrough()
    learner = task.build()
    model = learner.model()
    optimizer = learner.optimizer(model.parameters(), task.lr)
    stream = iter(learner.data(0, 1, task.batch, 0))

    def step() -> None:
        learner.loss(model, next(stream)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for what, limit in ((step, 0.05), (lambda: learner.evaluate(model), 0.15)):
        lasted = []
        for _ in range(5):
            began = time.thread_time()  # of this thread, without other work on the machine
            what()
            lasted.append(time.thread_time() - began)
        assert min(lasted) < limit, what


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_auc_counts_pairs_and_half_of_ties(levels: int) -> None:
    rng = torch.Generator().manual_seed(levels)
    scores = torch.randint(0, levels, (300,), generator=rng).double()
    clicked = (torch.rand(300, generator=rng) < 0.3).float()
    yes, no = scores[clicked > 0.5], scores[clicked < 0.5]
    above = (yes[:, None] > no).double() + 0.5 * (yes[:, None] == no)
    assert auc(scores, clicked) == pytest.approx(float(above.mean()), rel=1e-12)
    assert auc(scores, torch.ones(300)) == auc(scores, torch.zeros(300)) == 0.5


@pytest.mark.ranks
def test_zen_trains_it_like_dense_with_a_tenth_of_the_bytes() -> None:
    runs: dict[str, Any] = {}
    for name, compressor in (("dense", Dense()), ("zen", Zen())):
        e = Experiment(task=ClickThrough(), compressor=compressor, ranks=4, steps=6, pace=10, eval_every=6)
        runs[name] = simulate(e.checked(), real=True)
    losses = [r.samples[r.samples.name == "held_out"].value.tolist() for r in runs.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]
    dense, zen = (int(r.spans[(r.spans["rank"] == 0) & (r.spans.step == 5)].nbytes.sum()) for r in runs.values())
    assert zen < dense / 10
    floor = runs["zen"].samples[runs["zen"].samples.name == "held_out:entropy"].value
    assert float(floor.min()) == float(floor.max()) < losses[1][-1]


@pytest.mark.ranks
def test_the_task_is_simulated_with_shapes_only() -> None:
    e = Experiment(task=ClickThrough(), compressor=Zen(), ranks=8, steps=3, pace=10).checked()
    spans = simulate(e).spans
    assert 0 < int(spans[spans.step == 2].nbytes.sum()) < 8 * 4e6
