"""Tests DiLoCo against torch's outer optimizer, other strategies, and with sparse displacements."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.ranks import experiment, run, toy, weights
from tests.sim.virtual import samples
from tests.unit.plain_outer import MOMENTUM, SGD, Plain, outer_sgd
from workbench import simulate
from workbench.compressors import Cast, ErrorFeedback, TopK
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, DiLoCo, LocalSGD, SlowMo
from workbench.strategies._outer import Outer

pytestmark = pytest.mark.ranks


def reference(every: int, rounds: int, optimizer: object = MOMENTUM, ranks: int = 3, **outer: float) -> Plain:
    """Runs rounds of the paper's algorithm, with torch's SGD as the outer optimizer."""
    plain = Plain(ranks, optimizer)
    theta = plain.get()[0]
    step = outer_sgd(theta, **{"lr": 0.7, "momentum": 0.9, "nesterov": True, **outer})
    for _ in range(rounds):
        plain.train(every)
        theta = step(theta - plain.get().mean(0))
        plain.put(theta)
    return plain


@pytest.mark.parametrize("optimizer", [MOMENTUM, partial(torch.optim.AdamW, lr=1e-3)], ids=["sgd", "adamw"])
def test_diloco_is_the_papers_algorithm_with_any_inner_optimizer(optimizer: object) -> None:
    """Inner states stay on their ranks, as in the reference."""
    sessions = run(experiment(3, 12, task=toy(optimizer), strategy=DiLoCo(every=4)))
    want = reference(4, 3, optimizer).get()[0]
    for s in sessions:
        torch.testing.assert_close(weights(s), want, rtol=1e-5, atol=1e-5)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_with_plain_outer_averaging_it_is_local_sgd() -> None:
    mine, plain = (run(experiment(3, 12, strategy=s)) for s in (
        DiLoCo(every=4, outer_lr=1.0, outer_momentum=0.0), LocalSGD(every=4)))  # fmt: skip
    assert torch.equal(weights(mine[0]), weights(plain[0]))


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_with_rounds_of_one_step_it_is_ddp_with_nesterov_momentum(momentum: float) -> None:
    chosen = DiLoCo(every=1, outer_lr=1.0, outer_momentum=momentum)
    mine = run(experiment(3, 12, task=toy(SGD), strategy=chosen))
    ahead = toy(partial(torch.optim.SGD, lr=0.02, momentum=momentum, nesterov=momentum > 0))
    plain = run(experiment(3, 12, task=ahead, strategy=DDP()))
    torch.testing.assert_close(weights(mine[0]), weights(plain[0]), rtol=1e-5, atol=1e-6)


def test_outer_heavy_ball_is_slowmo_at_a_constant_rate() -> None:
    chosen = DiLoCo(every=4, outer_lr=0.8, outer_momentum=0.6, form="heavy-ball")
    mine, slow = (run(experiment(3, 12, strategy=s)) for s in (chosen, SlowMo(every=4, beta=0.6, alpha=0.8)))
    torch.testing.assert_close(weights(mine[0]), weights(slow[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_an_outer_step_is_torchs_sgd_with_the_displacement_as_its_gradient(nesterov: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    anchor = torch.randn(50, generator=rng, dtype=torch.float64)
    momentum, step = torch.zeros_like(anchor), outer_sgd(anchor, lr=0.7, momentum=0.9, nesterov=nesterov)
    for _ in range(6):
        gradient = torch.randn(50, generator=rng, dtype=torch.float64)
        want = step(gradient)
        Outer(0.9, rate=0.7, nesterov=nesterov).step(anchor, momentum, -gradient)
        torch.testing.assert_close(anchor, want, rtol=1e-14, atol=1e-14)


def test_the_first_outer_step_moves_by_more_than_the_mean() -> None:
    start = Plain(3, SGD)
    before = start.get()[0]
    start.train(4)
    moved = start.get().mean(0) - before
    mine = run(experiment(3, 4, task=toy(SGD), strategy=DiLoCo(every=4)))
    torch.testing.assert_close(weights(mine[0]) - before, 0.7 * 1.9 * moved, rtol=1e-3, atol=1e-6)


def test_outer_momentum_moves_parameters_without_learning() -> None:
    """In a round at a rate of nearly 0, D is 0, and the outer step is still eta mu^2 b."""
    still = Change(4, "lr", 1e-30)
    mine = run(experiment(3, 8, task=toy(SGD), strategy=DiLoCo(every=4)), still)
    first = reference(4, 1, SGD)
    start, after = Plain(3, SGD), first.get()[0]
    b = (after - start.get()[0]) / (0.7 * 1.9)
    torch.testing.assert_close(weights(mine[0]), after + 0.7 * 0.9**2 * b, rtol=1e-4, atol=1e-6)


def test_diloco_sends_the_model_once_a_round() -> None:
    s = run(experiment(4, 17, strategy=DiLoCo()))[0]
    buckets = sum(traffic("all_reduce", b.nbytes, 4)[0] for b in s.layout.buckets)
    by_step = {step: sum(sent for at, _, sent in s.record.comm() if at == step) for step in range(17)}
    assert by_step == {step: buckets if step in (7, 15) else 0 for step in range(17)}


def test_leaving_after_a_round_gives_outer_parameters_and_in_a_round_the_mean() -> None:
    out = Change(8, "lr", 1e-30), Change(8, "strategy", "DDP")
    after = run(experiment(3, 9, strategy=DiLoCo(every=4)), *out)
    torch.testing.assert_close(weights(after[0]), reference(4, 2).get()[0], rtol=1e-5, atol=1e-6)
    within = run(experiment(3, 9, strategy=DiLoCo(every=5)), *out)
    plain = reference(5, 1)
    plain.train(3)
    torch.testing.assert_close(weights(within[0]), plain.get().mean(0), rtol=1e-5, atol=1e-6)


def test_new_buckets_keep_the_outer_momentum() -> None:
    plain, turned = (run(experiment(2, 12, strategy=DiLoCo(every=4)), *c) for c in ((), (Change(6, "bucket_mb", 1.0),)))
    torch.testing.assert_close(weights(turned[0]), weights(plain[0]), rtol=1e-6, atol=1e-7)


def test_a_new_outer_knob_acts_from_the_next_round_on() -> None:
    turned = run(experiment(3, 8, strategy=DiLoCo(every=4)), Change(5, "outer_lr", 0.3))
    plain = Plain(3, MOMENTUM)
    theta = plain.get()[0]
    b = torch.zeros_like(theta)
    for eta in (0.7, 0.3):
        plain.train(4)
        gradient = theta - plain.get().mean(0)
        b = 0.9 * b + gradient
        theta = theta - eta * (gradient + 0.9 * b)
        plain.put(theta)
    torch.testing.assert_close(weights(turned[0]), theta, rtol=1e-5, atol=1e-6)


def test_sparse_displacements_train_with_error_feedback_and_no_outer_momentum() -> None:
    """SparseLoCo's exchange: 5 % of the displacement per round, and the rest in the residual."""
    sparse = ErrorFeedback(of=TopK(density=0.05))
    e = experiment(3, 60, strategy=DiLoCo(every=4, outer_lr=1.0, outer_momentum=0.0), compressor=sparse, eval_every=60)
    sessions = run(e)
    held = [v for _, name, _, v in sessions[0].record.samples if name == "held_out"]
    assert held[-1] < 0.7 * held[0]
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    sent = sum(n for _, _, n in sessions[0].record.comm())
    every = 2 * sum(round(0.05 * b.data.numel()) * 8 for b in sessions[0].layout.buckets)
    assert sent == 15 * every


def test_compressed_displacements_have_the_same_sign_as_in_local_sgd() -> None:
    """So a residual keeps its meaning through a switch between the two."""
    half = Cast(to="bf16")
    mine, plain = (run(experiment(2, 8, strategy=s, compressor=half)) for s in (
        DiLoCo(every=4, outer_lr=1.0, outer_momentum=0.0), LocalSGD(every=4)))  # fmt: skip
    assert torch.equal(weights(mine[0]), weights(plain[0]))
    rest = ErrorFeedback(of=TopK(density=0.1))
    mine, plain = (run(experiment(2, 4, strategy=s, compressor=rest)) for s in (DiLoCo(every=4), LocalSGD(every=4)))
    for name, left in mine[0].rank.memory.buffers["residual"].items():
        assert torch.equal(left, plain[0].rank.memory.buffers["residual"][name])


def test_the_simulator_trains_the_same() -> None:
    e = experiment(3, 10, strategy=DiLoCo(every=3))
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s in run(e):
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-5)


@pytest.mark.parametrize(("knob", "value"), [("every", 0), ("outer_lr", 0), ("outer_momentum", 1), ("form", "adam")])
def test_invalid_settings_are_refused_with_a_reason(knob: str, value: object) -> None:
    with pytest.raises(KnobError, match=f"strategy.{knob}=.*must be"):
        experiment(2, strategy=DiLoCo()).set(f"strategy.{knob}", value)
