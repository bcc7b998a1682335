"""Tests AsyncDrop against its recurrence in plain torch, and that sub-models compute and send less."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.ranks import batch, experiment, mse, net, run, toy
from workbench import simulate
from workbench.fabric import Fabric, Link, Slow
from workbench.host.passes.hidden_units import find_units
from workbench.host.passes.submodel import make_smaller, place_smaller, restore_whole
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Cut, Entries, Part, Units
from workbench.run import Run
from workbench.settings import Change, KnobError
from workbench.strategies import AsyncDrop
from workbench.tasks import ByteGPT, Colwise, Digits, Rowwise

pytestmark = pytest.mark.ranks

HIDDEN, LR, MOMENTUM = 12, 0.05, 0.9
SLOW = Fabric(link=Link(bandwidth=1000.0), faults=(Slow(rank=1, factor=3.5),))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4)).double()


def data(rank: int, ranks: int, seed: int) -> list[Any]:
    pairs = [batch(rank, step, 7) for step in range(64)]
    return [(x.double(), y.double()) for x, y in pairs]


SGD = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)


class Seen:
    """A loss that notes shapes, operations and whole models of training forwards."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()
        self.flops: set[int] = set()
        self.whole: list[torch.Tensor] = []

    def __call__(self, model: nn.Module, pair: Any) -> torch.Tensor:
        first = next(model.parameters())
        if not model.training or first.is_meta or hasattr(first, "fake_mode"):
            return mse(model, pair)
        self.shapes.add(tuple(first.shape))
        if first.shape[0] == HIDDEN:
            self.whole.append(flat(model))
        with FlopCounterMode(display=False) as counter:
            loss = mse(model, pair)
        self.flops.add(counter.get_total_flops())
        return loss


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained(strategy: AsyncDrop, ranks: int, steps: int = 10, fabric: Fabric = SLOW) -> tuple[Run, Seen]:
    """Simulates a run. Its last step uses DDP, which begins with the server's model."""
    seen = Seen()
    task = toy(SGD, partial(net, mlp), seen, data, None)
    e = experiment(ranks, steps, task=task, strategy=strategy, pace=5.0, fabric=fabric)
    return simulate(e, changes=[Change(steps - 1, "strategy", "DDP")], real=True), seen


def recurrence(order: list[int], ranks: int, keep: int, local: int, alpha: float, scale: float) -> torch.Tensor:
    """Returns the server's model after these messages: a rank's messages are in turn a request and its trained task.

    Rank 0 is the fastest, rank 1 the next.
    """
    a, ab, b, bb = (p.detach().clone() for p in net(mlp).parameters())
    first = a.clone(), ab.clone(), b.clone()
    drawn, tasks = [0] * ranks, dict[int, Any]()
    for rank in order:
        if rank not in tasks:
            moved = (a - first[0]).abs().sum(1) + (ab - first[1]).abs() + (b - first[2]).abs().sum(0)
            start = min(rank * HIDDEN // ranks, HIDDEN - keep)
            s = moved.argsort(descending=True, stable=True)[start : start + keep].sort().values
            w = [x.clone().requires_grad_() for x in (a[s], ab[s], scale * b[:, s], bb)]
            velocity = [torch.zeros_like(x) for x in w]
            for _ in range(local):
                x, y = data(rank, ranks, 0)[drawn[rank]]
                drawn[rank] += 1
                loss = F.mse_loss(torch.tanh(x @ w[0].T + w[1]) @ w[2].T + w[3], y)
                for p, v, g in zip(w, velocity, torch.autograd.grad(loss, w), strict=True):
                    v.mul_(MOMENTUM).add_(g)
                    p.data.sub_(LR * v)
            tasks[rank] = s, [x.detach() / (scale if x is w[2] else 1) for x in w]
        else:
            s, w = tasks.pop(rank)
            for x, new in ((a[s], w[0]), (ab[s], w[1]), (b[:, s], w[2]), (bb, w[3])):
                new.sub_(x).mul_(alpha).add_(x)
            a[s], ab[s], b[:, s], bb = w
    return torch.cat([x.reshape(-1) for x in (a, ab, b, bb)])


@pytest.mark.parametrize(("ranks", "knobs"), [
    (2, {"keep": 0.5, "local": 3, "mixing": 0.5, "scaled": False}),
    (2, {"keep": 0.75, "local": 2, "mixing": 0.9, "scaled": True}),
    (1, {"keep": 0.25, "local": 2, "mixing": 1.0, "scaled": True}),
])  # fmt: skip
def test_the_server_follows_the_recurrence_for_the_order_of_arrivals(ranks: int, knobs: dict[str, Any]) -> None:
    done, seen = trained(AsyncDrop(**knobs), ranks, fabric=SLOW if ranks > 1 else Fabric())
    rows = done.samples[(done.samples["name"] == "recv client") & (done.samples["rank"] == 0)]
    order = rows.sort_values("t", kind="stable")["value"].astype(int).to_list()
    keep, scale = round(knobs["keep"] * HIDDEN), 1 / knobs["keep"] if knobs["scaled"] else 1.0
    want = recurrence(order, ranks, keep, knobs["local"], knobs["mixing"], scale)
    assert len(seen.whole) == ranks and (want - flat(net(mlp))).abs().max() > 0.05
    for one in seen.whole:
        torch.testing.assert_close(one, want, rtol=1e-9, atol=1e-12)
    assert ranks == 1 or order[:4] != [0, 1, 0, 1], "one of them is late"


def test_full_models_fully_mixed_on_one_rank_equal_an_optimizer_restarted_per_task() -> None:
    _, seen = trained(AsyncDrop(keep=1.0, local=3, mixing=1.0), 1, 3, Fabric())
    model = net(mlp)
    for step in range(6):
        if step % 3 == 0:
            optimizer = SGD(model.parameters())
        optimizer.zero_grad()
        mse(model, data(0, 1, 0)[step]).backward()
        optimizer.step()
    torch.testing.assert_close(seen.whole[-1], flat(model), rtol=1e-9, atol=1e-12)


def test_a_sub_model_has_smaller_matrices_and_a_faster_forward() -> None:
    done, seen = trained(AsyncDrop(keep=0.5), 1, fabric=Fabric())
    whole = 2 * 4 * (8 * HIDDEN + HIDDEN * 4)
    assert seen.shapes == {(HIDDEN // 2, 8), (HIDDEN, 8)}, "the second is DDP's"
    assert seen.flops == {whole // 2, whole}
    computed = done.samples[done.samples["name"] == "computed"]["value"]
    assert set(computed) == {0.5}
    spans = done.spans[(done.spans.lane == "compute") & (done.spans.name == "forward")]
    lasts = (spans.t1 - spans.t0).round(9).groupby(spans.step).first().to_list()
    assert lasts == pytest.approx([lasts[-1] / 2] * 9 + [lasts[-1]])


def test_slower_ranks_may_have_smaller_sub_models_and_finish_more_tasks() -> None:
    done, _ = trained(AsyncDrop(keep=0.5, slowest=0.5), 2)
    computed = done.samples[done.samples["name"] == "computed"]
    assert [set(computed[computed["rank"] == r]["value"].round(6)) for r in (0, 1)] == [{0.5}, {0.25}]


@pytest.mark.parametrize("choose", ["changing", "random"])
def test_bytes_are_those_of_the_sub_models_and_follow_from_shapes(choose: str) -> None:
    e = experiment(2, 6, strategy=AsyncDrop(keep=0.25, choose=choose), pace=5.0)
    sent = []
    for real in (True, False):
        spans = simulate(e, real=real).spans
        spans = spans[spans.lane.isin(["comm", "background"])]
        sent.append(sorted(zip(spans["rank"], spans.name, spans.nbytes, strict=True)))
    assert sent[0] == sent[1]
    update = sum(n for rank, name, n in sent[0] if rank == 1 and name.startswith("send update"))
    a, b, c = 64 * 9, 64 * 64, 64 + 4 * 65
    assert update == 6 * 4 * (a // 4 + b // 4 + c), "a quarter of what units cut, and all else"


def test_entries_outside_a_sub_model_stay_exact_and_disjoint_ones_commute() -> None:
    units = [Units("a", 6, (Cut("w", (6, 4), 0), Cut("v", (2, 6, 3), 1))), Units("b", 4, (Cut("w", (6, 4), 1),))]
    parts = (Part("w", (6, 4), 0, 24), Part("v", (2, 18), 24, 60), Part("free", (5,), 60, 65))
    start = torch.randn(65)
    one, other = (Entries(units, [torch.tensor(rows), torch.tensor(columns)])
                  for rows, columns in (([0, 3, 5], [1, 2]), ([1, 2], [0, 1, 2, 3])))  # fmt: skip
    assert one.shape("w", (6, 4)) == (3, 2) and one.shape("v", (2, 18)) == (2, 9) and one.shape("free", (5,)) == (5,)
    bucket = Bucket(0, start.clone(), parts, 0)
    came = torch.randn(one.numel(bucket))
    assert one.pick(bucket).shape == came.shape == (3 * 2 + 2 * 9 + 5,)
    one.mix(bucket, came, 0.5)
    torch.testing.assert_close(one.pick(bucket), (one.pick(bucket.like(start)) + came) / 2)
    touched = bucket.like(torch.zeros(65))
    one.mix(touched, torch.ones_like(came))
    left = touched.data == 0
    assert int(left.sum()) == 65 - came.numel() and torch.equal(bucket.data[left], start[left])
    # all units but "free" differ between the two
    ways = []
    for first, second in ((one, other), (other, one)):
        x = bucket.like(start.clone())
        for entries in (first, second):
            generator = torch.Generator().manual_seed(entries.numel(x))
            entries.mix(x, torch.randn(entries.numel(x), generator=generator), 0.3)
        ways.append(x.data[:60])
    assert torch.equal(*ways)


@pytest.mark.parametrize("task", [Digits(width=4, hidden=16), ByteGPT(layers=2, width=16, heads=4, context=8)], ids=str)
def test_a_sub_model_equals_the_model_with_unread_dropped_units(task: Any) -> None:
    learner = task.build()
    torch.manual_seed(3)
    model = learner.model()
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    pair = next(iter(learner.data(0, 1, 4, 0)))
    units = find_units(model, learner)
    kept = [torch.randperm(each.size)[: max(1, each.size // 3)].sort().values for each in units]
    small = make_smaller(model, units, kept)
    place_smaller(small)
    sub = learner.loss(model, pair)
    restore_whole(small)
    for each, index in zip(units, kept, strict=True):
        cut = next(c for c in each.cuts if not c.param.startswith(f"{each.name}."))  # the next layer's
        read = model.get_parameter(cut.param).data.view(cut.view)
        others = torch.tensor([u for u in range(each.size) if u not in index.tolist()])
        read.index_fill_(1, others, 0.0)
    torch.testing.assert_close(learner.loss(model, pair), sub, rtol=1e-5, atol=1e-6)


class Residual(nn.Module):
    """The second layer reads the first layer's output, and adds its own output to it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        return self.c(h + self.b(h))


@pytest.mark.parametrize(("model", "split", "words"), [
    (Residual, None, "strategy=AsyncDrop: the task does not declare which features of a Residual a sub-model can omit"),
    (lambda: nn.Sequential(nn.Linear(8, 4), nn.Softmax(1)), None, "no two Linears or convolutions"),
    (Residual, lambda model: {"a": Colwise(), "b": Rowwise()}, "in a trial on one batch, a sub-model fails"),
    (Residual, lambda model: {"a": Colwise(), "c": Rowwise()}, "in a trial on one batch, a sub-model fails"),
    (Residual, lambda model: {"b": Colwise()}, "has no Colwise.. Linear followed by a Rowwise.. Linear"),
    (Residual, lambda model: {"d": Colwise()}, "the plan names d, and the model has no such module"),
])  # fmt: skip
def test_models_without_droppable_units_are_refused(model: Any, split: Any, words: str) -> None:
    task = toy(model=model, **({"split": split} if split else {}))
    with pytest.raises(KnobError, match=words):
        simulate(experiment(2, 2, task=task, strategy=AsyncDrop(), pace=5.0), real=True)


def test_a_plan_that_splits_heads_is_refused() -> None:
    whole = ByteGPT(layers=1, width=16, heads=4, context=8).build()
    plan = {"blocks.*.qkv": Colwise(packed=3), "blocks.*.attention_out": Rowwise()}
    task = toy(model=whole.model, loss=whole.loss, data=lambda rank, ranks, seed: whole.data(rank, ranks, 4, seed),
               evaluate=None, split=lambda model: plan)  # fmt: skip
    with pytest.raises(KnobError, match=r"units in another order the model has the loss .* stay `together`"):
        simulate(experiment(2, 2, task=task, strategy=AsyncDrop(), pace=5.0), real=True)


def test_real_ranks_train_sub_models_through_live_changes() -> None:
    shapes: list[tuple[int, ...]] = []

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        if model.training and not next(model.parameters()).is_meta:
            shapes.append(tuple(model.b.weight.shape))
        return mse(model, pair)

    wanted = [(2, "strategy.keep", 0.25), (4, "bucket_mb", 0.02), (6, "strategy", "DDP"), (8, "strategy", "AsyncDrop")]
    # fast ranks lead by some tasks: at a meeting they may have passed several changes, but not the end
    e = experiment(3, 30, task=toy(loss=loss), strategy=AsyncDrop(local=2), pace=1.0, clip=1.0)
    sessions = run(e.set("faults", (Slow(rank=1, factor=3.0),)), *(Change(*change) for change in wanted),
                   Change(9, "strategy", "DDP"))  # fmt: skip
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("change")) == 5
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert {(64, 64), (64, 32), (64, 16)} == set(shapes) - {()}, "whole under DDP, half, and a quarter"
    assert all(p.shape == q.shape for p, q in zip(sessions[1].model.parameters(), net().parameters(), strict=True))
    computed = {round(v, 6) for s in sessions for _, name, _, v in s.record.samples if name == "computed"}
    whole = 8 * 64 + 64 * 64 + 64 * 4
    assert computed == {round((whole - (1 - q) * (8 * 64 + 64 * 64)) / whole, 6) for q in (0.5, 0.25)}
