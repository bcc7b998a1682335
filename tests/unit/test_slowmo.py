"""Tests SlowMo: its result, the role of the learning rate, the inner optimizer and the bytes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.ranks import batch, experiment, mse, net, run, toy, weights
from tests.sim.virtual import samples
from tests.unit.plain_outer import MOMENTUM, SGD, Plain
from workbench import simulate
from workbench.engine.rank.session import Session
from workbench.fabric import traffic
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, LocalSGD, SlowMo
from workbench.strategies._outer import Outer

pytestmark = pytest.mark.ranks


def slow_momentum(session: Session) -> torch.Tensor:
    """Returns u in the order of the parameters' names: (n,) float64."""
    kept = session.state.memory.buffers["momentum"]
    return torch.cat([kept[name].double() for name in sorted(kept)])


def test_without_slow_momentum_it_equals_local_sgd() -> None:
    mine, plain = (run(experiment(3, 12, strategy=s)) for s in (SlowMo(beta=0.0, every=4), LocalSGD(every=4)))
    torch.testing.assert_close(weights(mine[0]), weights(plain[0]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("beta", "alpha"), [(0.5, 1.0), (0.8, 0.5)])
def test_with_rounds_of_one_step_it_equals_ddp_with_heavy_ball_momentum(beta: float, alpha: float) -> None:
    mine = run(experiment(3, 12, task=toy(SGD), strategy=SlowMo(beta=beta, alpha=alpha, every=1)))
    heavy = toy(partial(torch.optim.SGD, lr=alpha * 0.02, momentum=beta))
    plain = run(experiment(3, 12, task=heavy, strategy=DDP()))
    torch.testing.assert_close(weights(mine[0]), weights(plain[0]), rtol=1e-5, atol=1e-6)


def reference(beta: float, alpha: float, every: int, rates: list[float], ranks: int = 3) -> tuple[Plain, torch.Tensor]:
    """Runs the paper's algorithm, in rounds of a constant rate each."""
    plain = Plain(ranks, MOMENTUM)
    x = plain.get()[0]
    u = torch.zeros_like(x)
    for lr in rates:
        plain.at_rate(lr)
        plain.train(every)
        u = beta * u + (x - plain.get().mean(0)) / lr
        x = x - alpha * lr * u
        plain.put(x)
    return plain, u


def test_slowmo_equals_the_papers_algorithm() -> None:
    sessions = run(experiment(3, 12, strategy=SlowMo(beta=0.6, alpha=0.9, every=3)))
    plain, u = reference(0.6, 0.9, 3, [0.02] * 4)
    for s in sessions:
        torch.testing.assert_close(weights(s), plain.get()[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(slow_momentum(s), u, rtol=1e-4, atol=1e-4)
        assert torch.equal(slow_momentum(s), slow_momentum(sessions[0])), "the same bits on all ranks"


def test_a_rate_changed_between_rounds_scales_the_step_but_not_the_momentum() -> None:
    sessions = run(experiment(3, 12, strategy=SlowMo(beta=0.6, every=3)), Change(6, "lr", 0.005))
    plain, u = reference(0.6, 1.0, 3, [0.02, 0.02, 0.005, 0.005])
    torch.testing.assert_close(weights(sessions[0]), plain.get()[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slow_momentum(sessions[0]), u, rtol=1e-4, atol=1e-4)


def test_a_rate_changed_during_a_round_does_not_inflate_the_momentum() -> None:
    usual = run(experiment(2, 8, strategy=SlowMo(every=4)))[0]
    turned = run(experiment(2, 8, strategy=SlowMo(every=4)), Change(3, "lr", 1e-7), Change(4, "lr", 0.02))[0]
    assert slow_momentum(turned).norm() < 3 * slow_momentum(usual).norm()


def test_after_the_first_round_the_momentum_is_the_sum_of_mean_gradients() -> None:
    session = run(experiment(2, 4, task=toy(SGD), strategy=SlowMo(every=4)))[0]
    total: torch.Tensor | float = 0.0
    for rank in range(2):
        model = net()
        for step in range(4):
            loss = mse(model, batch(rank, step, 0))
            named = sorted(model.named_parameters())
            grads = torch.autograd.grad(loss, [p for _, p in named])
            total = total + torch.cat([g.reshape(-1).double() for g in grads]) / 2
            with torch.no_grad():
                for (_, p), g in zip(named, grads, strict=True):
                    p.sub_(g, alpha=0.02)
    torch.testing.assert_close(slow_momentum(session), total, rtol=1e-4, atol=1e-4)


def test_a_constant_displacement_converges_to_its_limit() -> None:
    anchor, momentum = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for _ in range(200):
        before = anchor.clone()
        Outer(0.8, gain=-1 / 0.1, rate=-0.5 * 0.1).step(anchor, momentum, torch.ones(1, dtype=torch.float64))
    assert float(anchor - before) == pytest.approx(0.5 / (1 - 0.8)), "alpha / (1 - beta) of it"


def inner(session: Session) -> torch.Tensor:
    state = session.optimizer.state
    return torch.cat([slots["momentum_buffer"].reshape(-1) for slots in state.values()])


def test_buffers_are_kept_zeroed_or_averaged_at_the_end_of_a_round() -> None:
    ends = {b: run(experiment(3, 8, strategy=SlowMo(every=4, buffers=b))) for b in ("keep", "zero", "average")}
    first, second = (inner(s) for s in ends["keep"][:2])
    assert not torch.equal(first, second) and bool(first.any())
    assert not any(bool(inner(s).any()) for s in ends["zero"])
    assert bool(inner(ends["average"][0]).any())
    assert all(torch.equal(inner(s), inner(ends["average"][0])) for s in ends["average"])


def test_averaged_buffers_equal_the_ranks_mean() -> None:
    kept, mean = (run(experiment(3, 4, strategy=SlowMo(every=4, buffers=b))) for b in ("keep", "average"))
    torch.testing.assert_close(inner(mean[1]), torch.stack([inner(s) for s in kept]).mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("buffers", "times"), [("keep", 1), ("zero", 1), ("average", 2)])
def test_it_sends_the_model_once_a_round_with_optimizer_state_if_averaged(buffers: str, times: int) -> None:
    s = run(experiment(4, 9, strategy=SlowMo(every=4, buffers=buffers)))[0]
    n = s.layout.byte_count
    buckets = sum(traffic("all_reduce", b.nbytes, 4)[0] for b in s.layout.buckets)
    by_step = {step: sum(sent for at, _, sent in s.record.comm() if at == step) for step in range(9)}
    once = buckets + (times - 1) * traffic("all_reduce", n, 4)[0]
    assert by_step == {step: once if step in (3, 7) else 0 for step in range(9)}


def test_a_switch_during_a_round_ends_it_in_the_mean() -> None:
    out = Change(7, "strategy", "DDP")
    mine = run(experiment(3, 8, strategy=SlowMo(every=4, beta=0.7)), Change(7, "lr", 1e-30), out)
    plain, _ = reference(0.7, 1.0, 4, [0.02])
    plain.train(3)
    torch.testing.assert_close(weights(mine[0]), plain.get().mean(0), rtol=1e-5, atol=1e-6)


def test_a_change_of_bucket_size_does_not_disturb_a_round() -> None:
    plain, turned = (run(experiment(2, 12, strategy=SlowMo(every=4)), *c) for c in ((), (Change(6, "bucket_mb", 1.0),)))
    torch.testing.assert_close(weights(turned[0]), weights(plain[0]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("buffers", ["keep", "zero", "average"])
def test_the_simulator_trains_the_same(buffers: str) -> None:
    e = experiment(3, 10, strategy=SlowMo(every=3, buffers=buffers))
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s in run(e):
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-5)


def test_adam_inside_is_zeroed_to_a_fresh_start() -> None:
    adam = toy(partial(torch.optim.Adam, lr=1e-3))
    s = run(experiment(2, 4, task=adam, strategy=SlowMo(every=4, buffers="zero")))[0]
    slots = [slots[k] for slots in s.optimizer.state.values() for k in ("step", "exp_avg", "exp_avg_sq")]
    assert slots and not any(bool(x.any()) for x in slots)


@pytest.mark.parametrize(("knob", "value"), [("every", 0), ("beta", 1.0), ("alpha", -1), ("buffers", "drop")])
def test_invalid_knobs_raise_knob_error(knob: str, value: object) -> None:
    with pytest.raises(KnobError, match=f"strategy.{knob}=.*must be"):
        experiment(2, strategy=SlowMo()).set(f"strategy.{knob}", value)
