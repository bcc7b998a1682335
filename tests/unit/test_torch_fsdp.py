"""torch's fully_shard as a strategy: against DDP and one process, entered and left live, with what models may have."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.ranks import Net, experiment, joined, mse, net, run, toy, weights
from workbench.engine.rank.session import Session
from workbench.optimizers import SGD, AdamW
from workbench.settings import Change, KnobError
from workbench.sim import simulate
from workbench.strategies import DDP, TorchFSDP

pytestmark = pytest.mark.ranks

adamw = partial(torch.optim.AdamW, lr=1e-2)


def seen(session: Session, name: str) -> list[float]:
    return [value for _, said, _, value in session.record.samples if said == name]


def remembered(session: Session) -> dict[str, torch.Tensor]:
    """What the optimizer remembers at the end, by slot and parameter."""
    state = session.training.optimizer.state
    return {f"{slot}/{place.name}": x for place in session.layout.order
            for slot, x in state[place.param].items() if isinstance(x, torch.Tensor)}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_learns_what_ddp_learns(ranks: int) -> None:
    e = experiment(ranks, 20, task=toy(adamw), eval_every=5)
    theirs, ours = run(e.set("strategy", TorchFSDP())), run(e)
    assert theirs[0].record.losses() == pytest.approx(ours[0].record.losses(), rel=1e-6)
    assert seen(theirs[0], "held_out") == pytest.approx(seen(ours[0], "held_out"), rel=1e-6)
    for s in theirs:
        torch.testing.assert_close(weights(s), weights(ours[0]), rtol=1e-5, atol=1e-6)


def test_it_learns_what_one_process_learns() -> None:
    sessions = run(experiment(3, 10, strategy=TorchFSDP()))
    torch.testing.assert_close(weights(sessions[0]), joined(3, 10), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_visit_that_makes_no_step_changes_no_bit(ranks: int) -> None:
    """Rows are dealt out unevenly among three; parameters and both moments come back as they were."""
    e = experiment(ranks, 9, task=toy(adamw))
    visited = run(e, Change(5, "strategy", "TorchFSDP"), Change(5, "strategy", "DDP"))
    plain = run(e)
    for s, p in zip(visited, plain, strict=True):
        assert len(s.record.noted("change")) == (2 if s.rank.id == 0 else 0)
        assert torch.equal(weights(s), weights(p))
        found, expected = remembered(s), remembered(p)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_ranks_are_handed_over_bit_for_bit_from_ddp_and_to_local_sgd() -> None:
    """Two numbers have one sum, so on two ranks its steps are DDP's, and each hand-over must keep every bit."""
    e = experiment(2, 20, task=toy(adamw))
    via = run(e, Change(6, "strategy", "TorchFSDP"), Change(12, "strategy", "LocalSGD"))
    plain = run(e, Change(12, "strategy", "LocalSGD"))
    assert len(via[0].record.noted("change")) == 2
    assert via[0].record.losses() == plain[0].record.losses()
    assert all(torch.equal(weights(v), weights(p)) for v, p in zip(via, plain, strict=True))


@pytest.mark.parametrize("target", ["ZeRO3", "ZeRO1", "TorchDDP", "DiLoCo", "Gossip", "AsyncServer", "Hogwild"])
def test_it_is_entered_from_and_left_to_strategies_of_every_kind(target: str) -> None:
    changes = [Change(3, "strategy", "TorchFSDP"), Change(6, "strategy", target), Change(9, "strategy", "TorchFSDP"),
               Change(12, "strategy", "DDP")]  # fmt: skip
    sessions = run(experiment(3, 15, optimizer=SGD(momentum=0.9), eval_every=4), *changes)
    assert len(sessions[0].record.noted("change")) == 4
    assert all(torch.equal(weights(s), weights(sessions[0])) for s in sessions)


@pytest.mark.parametrize(("path", "value"), [
    ("optimizer", AdamW(weight_decay=0.1)), ("bucket_mb", 0.03), ("bandwidth", 200), ("lr", 0.004), ("clip", 0.05),
])  # fmt: skip
def test_what_is_turned_meanwhile_acts_as_it_does_under_ddp(path: str, value: Any) -> None:
    e = experiment(2, 14, task=toy(adamw), optimizer=AdamW(), clip=1.0)
    theirs, ours = (run(e.set("strategy", which), Change(6, path, value)) for which in (TorchFSDP(), DDP()))
    assert not theirs[0].record.noted("refused")
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-5, atol=1e-6)
    assert seen(theirs[0], "grad_norm") == pytest.approx(seen(ours[0], "grad_norm"), rel=1e-5)


def test_on_an_emulated_link_its_messages_are_on_the_record() -> None:
    linked = experiment(2, 6, task=toy(adamw), strategy=TorchFSDP()).set("bandwidth", 50)
    sessions, plain = run(linked), run(experiment(2, 6, task=toy(adamw), strategy=TorchFSDP()))
    torch.testing.assert_close(weights(sessions[0]), weights(plain[0]), rtol=1e-5, atol=1e-7)
    step = [(what, n) for at, what, n in sessions[0].record.comm() if at == 3]
    psi = sessions[0].layout.nbytes
    assert sum(n for what, n in step if what == "reduce_scatter gradients") == pytest.approx(psi / 2, rel=0.01)
    assert psi / 2 <= sum(n for what, n in step if what == "all_gather params") <= psi * 1.01


class Odd(Net):
    """A frozen layer, a tied weight, running statistics, and a layer of three rows for four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.three = nn.BatchNorm1d(64), nn.Linear(4, 3)
        self.d = nn.Linear(64, 64, bias=False)
        self.d.weight = self.b.weight
        self.a.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.d(torch.tanh(self.norm(self.b(torch.tanh(self.a(x))))))
        return torch.cat([self.three(self.c(hidden)), self.c(hidden)[:, :1]], 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_may_have_frozen_and_tied_weights_buffers_and_fewer_rows_than_ranks(ranks: int) -> None:
    e = experiment(ranks, 12, task=toy(model=partial(net, Odd)), eval_every=4)  # Adam would blow up b.bias' noise
    theirs, ours = (run(e.set("strategy", which), Change(8, "strategy", "LocalSGD")) for which in (TorchFSDP(), DDP()))
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-4, atol=1e-5)
    for mine, its in zip(ours[0].model.buffers(), theirs[0].model.buffers(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_the_record_says_what_a_rank_holds() -> None:
    """8 layers of 0.26 MB on 4 ranks: shards of all, and what is whole beside them at the worst moment."""
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 256), *[nn.Linear(256, 256) for _ in range(8)], nn.Linear(256, 4))

    e = experiment(4, 5, task=toy(adamw, model=partial(net, layers)), bucket_mb=0.26, eval_every=4)
    session = run(e.set("strategy", TorchFSDP()))[0]
    psi, unit = session.layout.nbytes, 4 * 256 * 257
    held = seen(session, "memory parameters")
    assert psi / 4 + unit <= held[-1] <= psi / 4 + 4 * unit < psi, "in a step"
    assert seen(session, "memory optimizer state")[-1] == pytest.approx(2 * psi / 4, rel=0.02)
    assert psi / 4 <= seen(session, "memory gradients")[-1] <= psi / 4 + 3 * unit
    whole = run(e)[0]
    assert seen(whole, "memory parameters")[-1] == psi
    assert seen(session, "memory peak")[-1] < 0.6 * seen(whole, "memory peak")[-1]


def test_after_a_switch_away_nothing_of_the_copy_is_left() -> None:
    found: list[Any] = []

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        if isinstance(model, FSDPModule) and not found:
            found.append(weakref.ref(model))
        return mse(model, pair)

    run(experiment(2, 8, task=toy(loss=loss), strategy=TorchFSDP()), Change(4, "strategy", "DDP"))
    gc.collect()  # there are circles in it
    assert found[0]() is None


def test_the_simulator_refuses_it_and_says_what_would_do() -> None:
    with pytest.raises(KnobError, match=r"TorchFSDP: its exchange is torch's own.*simulate ZeRO3"):
        simulate(experiment(2, 4, strategy=TorchFSDP(), pace=2.0))


def test_the_runs_own_model_is_not_read_unawares() -> None:
    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        return mse(model, pair) + 0.0 * outside[0].c.weight.sum()

    outside: list[Any] = []

    def kept() -> nn.Module:
        outside.append(net())
        return outside[-1]

    with pytest.raises(AssertionError, match="fully_shard holds all of them in shards of"):
        run(experiment(2, 4, task=toy(model=kept, loss=loss), strategy=TorchFSDP()))


class Scalar(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def scaled() -> nn.Module:
    model = Scalar()
    model.a, model.b, model.c = (getattr(net(), name) for name in "abc")
    return model


def test_it_refuses_in_words_what_torch_cannot_share_out() -> None:
    session = run(experiment(2, 6, task=toy(model=scaled)), Change(3, "strategy", "TorchFSDP"))[0]
    assert "scale is a scalar" in session.record.noted("refused")[0][3]
    with pytest.raises(KnobError, match="TorchFSDP: it shares out the optimizer's state element by element"):
        experiment(2, 4, strategy=TorchFSDP()).set("optimizer", "LARS")


def test_units_computed_again_are_the_same() -> None:
    e = experiment(2, 10, task=toy(adamw, model=lambda: nn.Sequential(*net().children())), strategy=TorchFSDP())
    again = run(e, Change(3, "checkpoint", "units"), Change(7, "checkpoint", "none"))
    assert not again[0].record.noted("refused")
    assert torch.equal(weights(again[0]), weights(run(e)[0]))


class Experts(nn.Module):
    """Each batch reaches one of three last layers, and ranks others than their neighbours'."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last[int(x[0, 0].abs() * 10) % 3](torch.tanh(self.first(x)))


def test_ranks_whose_examples_reach_other_parameters_learn_what_ddp_learns() -> None:
    e = experiment(3, 8, task=toy(model=partial(net, Experts)))
    theirs, ours = run(e.set("strategy", TorchFSDP())), run(e)
    for s in theirs:
        torch.testing.assert_close(weights(s), weights(ours[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", [1, 3])
def test_experts_that_are_units_and_that_some_ranks_skip_are_refused_in_words(which: int) -> None:
    """torch gathers unit by unit: ranks that go to unlike experts ended the process, or waited for ever."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(8, 40), nn.Linear(40, 4)
            self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(which))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.first(x))
            return self.out(self.experts[int(x[0, 0].abs() * 10) % which](y) if x[0, 0] > 0 else y)

    e = experiment(2, 12, task=toy(model=partial(net, Skipping)), strategy=TorchFSDP(), bucket_mb=0.01)
    said = r"TorchFSDP: rank 0 (gathers|sums) .* where rank 1 (gathers|sums) .*; take ZeRO2, or a bucket_mb above 0\.0"
    with pytest.raises(AssertionError, match=said):
        run(e)
    for s in run(e.set("bucket_mb", 0.02)):  # with which they are units no longer, nor is the list that holds them
        assert torch.isfinite(weights(s)).all()
