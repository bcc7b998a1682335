"""ShadowSync against its formulas, on the simulator and on real ranks: rows, bytes, and a switch both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.golden.shadow_sync import Batch, Params, gradients, in_turn, served
from tests.ranks import experiment, run, toy, weights
from tests.sim.virtual import samples
from workbench import simulate
from workbench.fabric import Fabric, Link, Slow
from workbench.optimizers import LAMB, AdamW
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, ShadowSync, ShadowSyncBMUF, ShadowSyncMA, Strategy
from workbench.tasks import ClickThrough, Digits

pytestmark = pytest.mark.ranks

LR, BATCH, WIDTHS = 0.05, 4, (3, 2)
SHAPES = {"a": (7, 3), "b": (5, 2), "w": (5,)}


def begun() -> Params:
    rng = np.random.default_rng(3)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def batches(rank: int, number: int) -> Batch:
    rng = np.random.default_rng([rank, number])
    ids = np.stack([rng.integers(0, SHAPES[name][0], BATCH) for name in "ab"], 1)
    return ids, rng.normal(size=BATCH)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            setattr(self, name, nn.Embedding(*SHAPES[name], _weight=torch.from_numpy(begun()[name])))
        self.w = nn.Parameter(torch.from_numpy(begun()["w"]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(ids[:, 0]), self.b(ids[:, 1])], 1) @ self.w


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean() / 2


def lookups(batch: Any) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": ids for name, ids in zip("ab", batch[0].unbind(1), strict=True)}


def data(rank: int, ranks: int, seed: int) -> list[Any]:
    return [tuple(torch.from_numpy(x) for x in batches(rank, number)) for number in range(64)]


def evaluated(model: nn.Module) -> float:
    return float(loss(model, data(9, 0, 0)[0]))


def chosen(ranks: int, steps: int, optimizer: Any, lr: float = LR, **rest: Any) -> Any:
    task = toy(optimizer, Scores, loss, data, evaluated, lookups=lookups)
    return experiment(ranks, steps, task=task, pace=2.0, lr=lr, **rest)


@pytest.mark.parametrize("strategy", [ShadowSync(alpha=1.0), ShadowSyncMA(), ShadowSyncBMUF(eta=0.0)], ids=str)
@pytest.mark.parametrize("host", ["simulator", "engine"])
def test_with_one_trainer_it_is_the_optimizer_that_steps_rows_alone_and_a_switch_loses_nothing(
    host: str, strategy: Strategy
) -> None:
    e = chosen(2, 12, torch.optim.Adam, strategy=DDP())
    changes = Change(3, "strategy", strategy), Change(8, "strategy", "DDP")
    if host == "engine":
        sessions = run(e, *changes)
        found = sessions[0].record.losses()
        assert torch.equal(weights(sessions[0]), weights(sessions[1]))
    else:
        found = samples(simulate(e, changes=changes, real=True), "loss", 0)
    want = in_turn(begun(), LR, batches, range(3, 8), 12)
    np.testing.assert_allclose(found, want, rtol=1e-9)


@pytest.mark.parametrize("servers", [1, 2])
def test_pushes_are_made_one_by_one_in_the_order_in_which_servers_hear_of_them(servers: int) -> None:
    fabric = Fabric(link=Link(bandwidth=1.0, latency=0.3), faults=(Slow(rank=1, factor=1.6),))
    done = simulate(chosen(2 + servers, 15, torch.optim.SGD, strategy=ShadowSync(servers=servers, alpha=0.0),
                           fabric=fabric), real=True)  # fmt: skip
    if servers == 2:  # each server has one table and its own order; both are known to learn
        assert all(np.mean(samples(done, "loss", r)[-5:]) < np.mean(samples(done, "loss", r)[:5]) for r in range(2))
        return
    spans, heard = done.spans, done.samples
    asked = {}
    for who in range(2):
        sent = spans[(spans["rank"] == who) & (spans.name == "send turn to 2")].sort_values("asked", kind="stable")
        asked[who] = iter(["meet" if n == 32 else "push" if n == 24 else "look up" for n in sent.nbytes])
    turns = [(int(who), next(asked[int(who)])) for who in heard[heard["name"] == "recv turn"]["value"]]
    want = served(begun(), LR, batches, [turn for turn in turns if turn[1] != "meet"], 2)
    for who in range(2):
        np.testing.assert_allclose(samples(done, "loss", who), want[who], rtol=1e-9)
    pushes = [who for who, what in turns if what == "push"]
    assert len(pushes) == 30 and pushes != sorted(pushes), "trainers took turns"


@pytest.mark.parametrize("real", [True, False])
def test_rows_cross_and_not_tables(real: bool) -> None:
    done = simulate(chosen(3, 4, torch.optim.SGD, strategy=ShadowSync(servers=1)), real=real)
    spans = done.spans[done.spans.lane == "comm"]
    for step in range(4):
        ids = batches(0, step if real else 0)[0]  # with sizes only one batch stands for all
        rows = [len(np.unique(ids[:, k])) for k in range(2)]
        values = 8 * sum(n * width for n, width in zip(rows, WIDTHS, strict=True))
        mine = spans[(spans["rank"] == 0) & (spans.step == step)]
        turns = mine[mine.name == "send turn to 2"].nbytes
        assert turns[turns != 32].sum() == 8 * sum(rows) + 40 + 8 * 2
        assert mine[mine.name == "send grads 0 to 2"].nbytes.sum() == values
    shadow = spans[spans.name.str.startswith("send shadow")].nbytes
    assert len(shadow) and set(shadow) == {8 * SHAPES["w"][0]}, "of the rest, which has no table in it"


def test_the_evaluated_model_has_the_servers_tables() -> None:
    strategy = ShadowSync(servers=2, alpha=1.0)  # with one trainer the centre is its replica when a round is over
    done = simulate(chosen(3, 10, torch.optim.SGD, strategy=strategy, eval_every=5), real=True)
    plain = Scores()
    optimizer, found = torch.optim.SGD(plain.parameters(), lr=LR), []
    for batch in data(0, 0, 0)[:10]:
        with torch.no_grad():
            found.append(plain.w.clone())
        optimizer.zero_grad()
        loss(plain, batch).backward()
        optimizer.step()
    heads = [plain.w.detach().clone(), *reversed(found)]
    could = []
    for head in heads[:3]:  # the round of the last steps may be under way
        with torch.no_grad():
            plain.w.copy_(head)
            could.append(evaluated(plain))
    assert min(abs(samples(done, "held_out", 0)[-1] - x) for x in could) < 1e-9


@pytest.mark.parametrize("host", ["simulator", "engine"])
def test_workers_train_on_batches_and_rows_of_their_own(host: str) -> None:
    """A worker that reads a batch twice, or another's rows or gradients, would leave the line below."""
    e = chosen(2, 10, torch.optim.SGD, strategy=ShadowSync(alpha=1.0, workers=3), lr=1e-9)
    drawn = [gradients(begun(), batches(0, number))[0] for number in range(30)]
    if host == "engine":
        sessions = run(e)
        found, names = sessions[0].record.losses(), {what for _, what, _ in sessions[1].record.comm()}
    else:
        done = simulate(e, real=True)
        found, names = samples(done, "loss", 0), set(done.spans[done.spans["rank"] == 1].name)
    np.testing.assert_allclose(found, np.reshape(drawn, (10, 3)).mean(1), rtol=1e-6)
    assert {f"send rows {worker} to 0" for worker in range(3)} <= names


def test_on_the_engine_no_workers_update_is_lost_and_it_is_left_with_one_state() -> None:
    """At a rate so small that gradients stay as they are, what moved is the sum of all gradients in any order."""
    lr = 1e-7
    e = chosen(2, 21, torch.optim.SGD, strategy=ShadowSync(alpha=1.0, workers=3))
    sessions = run(e.set("lr", lr), Change(20, "strategy", "DDP"))
    assert torch.equal(weights(sessions[0]), weights(sessions[1]))
    grads = [gradients(begun(), batches(0, number))[1] for number in range(60)]
    last = [gradients(begun(), batches(rank, 60 * (rank == 0)))[1] for rank in range(2)]
    moved = {name: sum(g[name] for g in grads) + sum(g[name] for g in last) / 2 for name in SHAPES}
    for name, param in sessions[0].model.named_parameters():
        key = name.split(".")[0]
        np.testing.assert_allclose((begun()[key] - param.detach().numpy()) / lr, moved[key], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [ShadowSync, ShadowSyncMA, ShadowSyncBMUF])
def test_what_cannot_be_is_said_in_a_sentence(kind: type[ShadowSync]) -> None:
    with pytest.raises(KnobError, match=r"task=Digits: does not declare which rows .* take ClickThrough"):
        experiment(3, strategy=kind(), task=Digits())
    with pytest.raises(KnobError, match="servers=3 leaves none of 3 ranks to train"):
        experiment(3, strategy=kind(servers=3), task=ClickThrough())
    with pytest.raises(KnobError, match="Lamb is not known to step each element by itself"):
        experiment(3, strategy=kind(), task=ClickThrough(), optimizer=LAMB())


def test_tables_that_the_model_has_not_are_refused_when_it_is_chosen_live_too() -> None:
    task = toy(torch.optim.SGD, Scores, loss, data, evaluated, lookups=lambda batch: {"c.weight": batch[0][:, 0]})
    e = experiment(2, 4, task=task, pace=2.0)
    done = simulate(e, changes=[Change(2, "strategy", "ShadowSync")], real=True)
    (refused,) = done.marks[done.marks["name"] == "refused"].detail
    assert "'c.weight' is not the weight of a trained embedding; there are b.weight, a.weight" in str(refused)
    assert not done.changes and done.state == "done"


@pytest.mark.parametrize("kind", [ShadowSync, ShadowSyncMA, ShadowSyncBMUF])
def test_knobs_turn_while_tables_lie_on_servers(kind: type[ShadowSync]) -> None:
    changes = [Change(3, "strategy.servers", 2), Change(6, "bucket_mb", 0.02), Change(8, "optimizer", AdamW()),
               Change(10, "strategy.servers", 1), Change(12, "strategy", "DDP")]  # fmt: skip
    done = simulate(chosen(4, 16, torch.optim.Adam, strategy=kind()), changes=changes, real=True)
    assert [c.path for c in done.changes] == [c.path for c in changes], "each hand-over has compared all ranks"
    assert done.state == "done"
