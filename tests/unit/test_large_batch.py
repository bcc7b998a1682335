"""Tests large batches as live settings: scaled learning rate, warm-up and clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.ranks import batch, experiment, mse, net, run, shipped, toy, weights
from tests.sim.virtual import paced, samples
from workbench import simulate
from workbench.experiment import Experiment
from workbench.experiment.rate_factor import compute_rate_factor
from workbench.fabric import Slow
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, AsyncServer, LocalSGD, ShadowMA, Strategy, SyncServer, Wavelet
from workbench.tasks import Digits

pytestmark = pytest.mark.ranks

ALL = {n: cls for n, cls in shipped(Strategy).items() if not cls.opaque}


def noted(session: Any, name: str) -> list[tuple[int, float]]:
    """Returns (step, value) of every Sample with this name."""
    return [(step, v) for step, n, _, v in session.record.samples if n == name]


def rates(session: Any, steps: int) -> list[float]:
    """Returns the learning rate of each step from the record, which notes changes only."""
    said, now = dict(noted(session, "lr")), 0.0
    return [now := said.get(step, now) for step in range(steps)]


examples = batch


def sized(rank: int, ranks: int, seed: int, batch: int = 4) -> list[Any]:
    return [examples(rank, step, seed, batch) for step in range(64)]


@dataclass(frozen=True, kw_only=True)
class Piecemeal(Strategy):
    """Updates bucket by bucket."""

    clips: ClassVar[bool] = False

    async def step(self, rank: Any, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        for bucket in await rank.params():
            await rank.update(bucket)


# learning rate


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1.0),
        ({"lr_scaled": True}, 4.0),
        ({"lr_scaled": True, "batch": 128}, 16.0),
        ({"lr_scaled": True, "lr_base": 64}, 2.0),
        ({"lr_scaled": True, "strategy": DDP(accumulate=3)}, 12.0),
        ({"lr_scaled": True, "strategy": Wavelet()}, 8.0),
        ({"lr_scaled": True, "strategy": AsyncServer(servers=1)}, 3.0),
        ({"lr_scaled": True, "lr_base": 256}, 0.5),
    ],
    ids=str,
)
def test_the_rate_is_in_proportion_to_the_global_batch(settings: dict[str, Any], expected: float) -> None:
    """Digits recommends 32 examples on one rank; these are 4 ranks."""
    assert compute_rate_factor(Experiment(task=Digits(), ranks=4, **settings).checked()) == expected


def test_scaling_is_off_by_default_and_the_rate_is_recorded_once() -> None:
    for session in run(experiment(2, 6)):
        assert noted(session, "lr") == [(0, 0.02)]


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=2)], ids=str)
def test_the_rate_rises_linearly_from_lr_to_k_times_lr_on_both_hosts(strategy: Strategy) -> None:
    e = experiment(4, 9, strategy=strategy, lr=0.01, lr_scaled=True, lr_warmup=5)
    expected = pytest.approx([0.01 * (1 + 3 * min(1, t / 5)) for t in range(9)])
    sessions = run(e)
    assert [rates(s, 9) for s in sessions] == [expected] * 4
    assert sessions[0].optimizer.param_groups[0]["lr"] == pytest.approx(0.04) == sessions[0].rank.lr
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s in sessions:
        lr = samples(simulated, "lr", s.rank.index).tolist()
        assert lr == [v for _, v in noted(s, "lr")] == expected.expected[:6]
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-5, atol=1e-6)
    assert samples(simulate(e.set("pace", 5.0)), "lr", 2).tolist() == lr


def test_without_scaling_a_warm_up_begins_at_one_part_of_lr() -> None:
    (session,) = run(experiment(1, 8, lr=0.01, lr_warmup=4))
    assert rates(session, 8) == pytest.approx([0.0025 + 0.0075 * min(1, t / 4) for t in range(8)])


def test_ranks_with_warm_up_equal_one_process_with_the_schedule() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for step in range(8):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + min(1, step / 4))
        optimizer.zero_grad()
        for rank in range(2):
            (mse(model, batch(rank, step, 0)) / 2).backward()
        optimizer.step()
    whole = torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])
    for s in run(experiment(2, 8, lr=0.01, lr_scaled=True, lr_warmup=4)):
        torch.testing.assert_close(weights(s), whole, rtol=1e-5, atol=1e-6)


def test_k_small_steps_nearly_equal_one_step_with_k_times_the_rate() -> None:
    """f(w) = w^2 / 2 has a slowly turning gradient: k = 8, rate 0.001, error of the order (k lr)^2."""
    w_small, w_large, lr, k = 1.0, 1.0, 1e-3, 8
    for _ in range(k):
        w_small -= lr * w_small
    w_large -= k * lr * w_large
    assert abs(w_small - w_large) < (k * lr) ** 2 and abs(w_small - 1) > 7 * lr


def test_live_scaling_rises_from_the_present_rate_and_lr_acts_at_once() -> None:
    e = experiment(4, 20, lr=0.01)
    turns = [
        Change(3, "lr_warmup", 4), Change(5, "lr_scaled", True), Change(7, "lr", 0.02), Change(14, "lr_scaled", False)
    ]  # fmt: skip
    sessions = run(e, *turns)
    up = [1, 1.75, 2.5, 3.25, 4]
    expected = [0.01] * 5 + [0.01, 0.0175, 0.05, 0.065] + [0.08] * 5 + [0.02 * f for f in reversed(up)] + [0.02]
    assert rates(sessions[0], 20) == pytest.approx(expected)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    simulated = simulate(e.set("pace", 5.0), changes=turns, real=True)
    assert samples(simulated, "lr", 3).tolist() == [v for _, v in noted(sessions[3], "lr")]


def test_groups_keep_their_ratio_while_the_rate_rises() -> None:
    def two(params: Any) -> torch.optim.Optimizer:
        first, *rest = params
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.01}], lr=0.1)

    for s in run(experiment(2, 5, task=toy(two), lr_scaled=True, lr_warmup=10)):
        assert [g["lr"] for g in s.optimizer.param_groups] == pytest.approx([0.14, 0.014])
        assert s.rank.lr == pytest.approx(0.14)


@pytest.mark.parametrize("before", [ShadowMA(), AsyncServer(), SyncServer()], ids=str)
def test_ranks_with_different_step_counts_share_the_rate_under_ddp(before: Strategy) -> None:
    """Rank 1 is 3 times as slow, and all changes come in the middle of the warm-up."""
    e = paced(3, 60, strategy=before, faults=(Slow(rank=1, factor=3.0),), lr=0.001)
    turns = [Change(4, "lr_warmup", 60), Change(4, "lr_scaled", True), Change(20, "strategy", "DDP")]
    run = simulate(e, changes=turns, real=True)
    found = run.timeline.samples.rows()
    switched = max(step for _, step, name in zip(run.spans["rank"], run.spans.step, run.spans.lane, strict=True)
                   if name == "switch")  # fmt: skip
    by_rank = [
        {s: v for s, v, n, r in zip(found.step, found.value, found.name, found.rank, strict=True)
         if n == "lr" and r == rank and s > switched} for rank in range(3)
    ]  # fmt: skip
    assert len(by_rank[0]) > 10 and by_rank[0] == by_rank[1] == by_rank[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_scaled": True, "lr_base": 8}, "lr_base=8: this task makes its own batches; set `batch`"),
        ({"lr_scaled": True, "batch": 8, "task": toy(data=sized)}, "set lr_base"),
        ({"lr_warmup": -1}, "lr_warmup=-1: must be an integer in"),
        ({"clip": -1.0}, "clip=-1.0: must be a number in"),
    ],
)
def test_invalid_settings_are_refused_with_a_reason(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(KnobError, match=words):
        experiment(2, 4, **settings)


def test_a_larger_live_batch_raises_the_rate() -> None:
    e = experiment(2, 8, task=toy(data=sized), batch=4, lr=0.01, lr_scaled=True, lr_base=8)
    assert rates(run(e, Change(4, "batch", 12))[0], 8) == pytest.approx([0.01] * 4 + [0.03] * 4)


def test_a_rate_set_back_to_0_is_the_tasks_own_again() -> None:
    (session,) = run(experiment(1, 6), Change(2, "lr", 0.005), Change(4, "lr", 0.0))
    assert rates(session, 6) == [0.02, 0.02, 0.005, 0.005, 0.02, 0.02]


# clipping


def clipped_reference(ranks: int, steps: int, limit: float) -> tuple[torch.Tensor, list[float]]:
    """One process on the joined batch, with an explicit norm."""
    model, norms = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (mse(model, batch(rank, step, 0)) / ranks).backward()
        grads = [p.grad for p in model.parameters()]
        norms.append(float(torch.cat([g.reshape(-1).double() for g in grads]).norm()))
        for g in grads:
            g.mul_(min(1.0, limit / (norms[-1] + 1e-6)))
        optimizer.step()
    return torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())]), norms


def test_ddp_clips_the_mean_gradient_on_both_hosts() -> None:
    whole, norms = clipped_reference(3, 8, 1.8)
    assert min(norms) < 1.8 < max(norms), "some are shortened and some are not"
    e = experiment(3, 8, clip=1.8)
    sessions = run(e)
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s in sessions:
        torch.testing.assert_close(weights(s), whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose([v for _, v in noted(s, "grad_norm")], norms, rtol=1e-4)
        np.testing.assert_allclose(samples(simulated, "grad_norm", s.rank.index), norms, rtol=1e-4)
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-5, atol=1e-6)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_local_sgd_clips_each_ranks_own_gradient() -> None:
    model, moved, norms = net(), [], []
    for rank in range(3):
        grads = torch.autograd.grad(mse(model, batch(rank, 0, 0)), [p for _, p in sorted(model.named_parameters())])
        norms.append(float(torch.cat([g.reshape(-1) for g in grads]).norm()))
        moved.append(torch.cat([0.02 * g.reshape(-1).double() for g in grads]) * min(1.0, 0.5 / norms[-1]))
    start = torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])
    sessions = run(experiment(3, 1, strategy=LocalSGD(every=1), clip=0.5))
    assert [noted(s, "grad_norm")[0][1] for s in sessions] == pytest.approx(norms, rel=1e-4) and max(norms) > 0.5
    torch.testing.assert_close(weights(sessions[0]), start - sum(moved) / 3, rtol=1e-5, atol=1e-6)


def test_a_limit_above_every_norm_changes_nothing() -> None:
    for a, b in zip(run(experiment(2, 6)), run(experiment(2, 6, clip=1e5)), strict=True):
        assert torch.equal(weights(a), weights(b)) and not noted(a, "grad_norm") and len(noted(b, "grad_norm")) == 6


def test_the_clip_limit_changes_live() -> None:
    (session, _) = run(experiment(2, 9), Change(3, "clip", 0.3), Change(6, "clip", 0.0))
    assert [step for step, _ in noted(session, "grad_norm")] == [3, 4, 5]


@pytest.mark.parametrize("name", ALL)
def test_every_strategy_clips_each_update_or_refuses(name: str) -> None:
    """A claim without a clipped update would be a limit without effect."""
    strategy = ALL[name]()
    if not strategy.clips:
        with pytest.raises(KnobError, match=f"clip=0.5: under {name} .* use clip=0 with it"):
            paced(4, 8, strategy=strategy, clip=0.5)
        return
    # with several ranks of workers that share memory, the simulator has shapes only
    ranks = 1 if strategy.shared else 4
    run = simulate(paced(ranks, 8, strategy=strategy, clip=1e-3), real=True)
    norms = [samples(run, "grad_norm", rank) for rank in range(ranks) if strategy.trains(rank, ranks)]
    assert all(len(n) >= 1 and (n > 1e-3).any() for n in norms)


def test_strategies_without_a_norm_refuse_clip() -> None:
    e = paced(2, 4, strategy=DDP(), clip=1.0)
    for before, path, value in ((e, "strategy", "Piecemeal"), (Experiment(strategy=Piecemeal()), "clip", 1.0)):
        with pytest.raises(KnobError, match="under Piecemeal an update does not see all gradients"):
            before.set(path, value)
    with pytest.raises(KnobError, match="use clip=0 with it, or DDP"):
        simulate(e, changes=[Change(2, "strategy", "Piecemeal")], real=True)
    assert simulate(paced(2, 4, strategy=Piecemeal())).state == "done"
