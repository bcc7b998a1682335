"""Compares Newton with directly solved systems, and tests it live."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.agree import crosses_alike, memory_alike, sampled
from tests.ranks import batch, experiment, fingerprint, net, run, toy, weights
from workbench import simulate
from workbench.experiment import Experiment
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, Newton

pytestmark = pytest.mark.ranks
EXAMPLES, LINE = 16, partial(nn.Linear, 8, 4, bias=False, dtype=torch.float64)


def data(rank: int, ranks: int, seed: int) -> list[Any]:
    return [tuple(x.double() for x in batch(rank, step, seed, EXAMPLES)) for step in range(64)]


def half_squares(model: nn.Module, pair: Any) -> torch.Tensor:
    return (model(pair[0]) - pair[1]).square().sum(1).mean() / 2


TASK = toy(model=partial(net, LINE), data=data, loss=half_squares, evaluate=None)


def made(ranks: int, strategy: Any, steps: int = 1, **rest: Any) -> Experiment:
    return experiment(ranks, steps, **{"task": TASK, "lr": 1.0, "strategy": strategy, **rest})


def regression(rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the (8, 8) curvature of a matrix row, the (4, 8) slope at the start, and one rank's inputs of step 0."""
    x, y = (t.numpy() for t in data(rank, 1, 0)[0])
    return x.T @ x / len(x), (x @ start().T - y).T @ x / len(x), x


def start() -> np.ndarray:
    return net(LINE).weight.detach().numpy()


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_a_quadratic_one_step_reaches_the_minimum_of_the_joint_loss(ranks: int) -> None:
    pairs = [data(r, ranks, 0)[0] for r in range(ranks)]
    x, y = (torch.cat(part).numpy() for part in zip(*pairs, strict=True))
    best = np.linalg.lstsq(x, y, rcond=None)[0].T
    assert np.abs(best - start()).max() > 0.1
    for session in run(made(ranks, Newton(iterations=40, damping=1e-10))):
        np.testing.assert_allclose(session.model.weight.detach(), best, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("damping", [1e-10, 0.3])
def test_giants_direction_is_the_mean_of_the_ranks_own_solutions(damping: float) -> None:
    """Wang et al. 2018, equation 5: each rank's own curvature, the common gradient."""
    every = [regression(r) for r in range(3)]
    slope = np.mean([g for _, g, _ in every], 0)
    alone = [np.linalg.solve(a + damping * np.eye(8), slope.T).T for a, _, _ in every]
    for session in run(made(3, Newton(products="local", iterations=40, damping=damping, tries=1))):
        np.testing.assert_allclose(session.model.weight.detach(), start() - np.mean(alone, 0), rtol=1e-6, atol=1e-8)


def test_few_iterations_are_conjugate_gradients() -> None:
    """The reference is Hestenes and Stiefel's recurrence on the whole matrix, for two steps, before it converges."""
    a = np.kron(np.eye(4), np.mean([regression(r)[0] for r in range(2)], 0)) + 0.1 * np.eye(32)
    r = -np.mean([regression(r)[1] for r in range(2)], 0).ravel()
    d, p = np.zeros(32), r.copy()
    for _ in range(2):
        step = r @ r / (p @ a @ p)
        d, left = d + step * p, r - step * a @ p
        p, r = left + (left @ left) / (r @ r) * p, left
    assert np.linalg.norm(r) > 1e-3, "solved already"
    (session, _) = run(made(2, Newton(iterations=2, damping=0.1, tries=1)))
    np.testing.assert_allclose(session.model.weight.detach().numpy().ravel(), start().ravel() + d, rtol=1e-9)


@pytest.mark.parametrize(("lr", "tries", "length"), [(1.0, 4, 1.0), (3.0, 4, 1.5), (20.0, 3, 0.0), (3.0, 1, 3.0)])
def test_newton_takes_the_first_step_length_with_enough_decrease(lr: float, tries: int, length: float) -> None:
    """On a quadratic f(s) - f(0) = (s - s^2/2) g . d, so s is good up to 2 (1 - 0.1) = 1.8; 20, 10 and 5 are not."""
    strategy = Newton(iterations=40, damping=1e-10, tries=tries)
    sessions = run(made(2, strategy, lr=lr))
    pairs = [data(r, 2, 0)[0] for r in range(2)]
    x, y = (torch.cat(part).numpy() for part in zip(*pairs, strict=True))
    best = np.linalg.lstsq(x, y, rcond=None)[0].T
    for session in sessions:
        np.testing.assert_allclose(session.model.weight.detach(), start() + length * (best - start()), atol=1e-7)
        said = [v for _, name, _, v in session.record.samples if name == "step length"]
        assert said == ([length] if tries > 1 else [])


@pytest.mark.parametrize("products", ["summed", "local"])
def test_both_hosts_send_keep_and_learn_the_same(products: str) -> None:
    task = toy(model=lambda: net().double(), data=data, evaluate=None)
    e = made(3, Newton(products=products, iterations=3, damping=1.0), steps=8, task=task, pace=5.0)
    sessions = run(e)
    for real in (False, True):
        crosses_alike(simulate(e, real=real), sessions)
    memory_alike(e, sessions)
    simulated = simulate(e, real=True)
    for rank, session in enumerate(sessions):
        np.testing.assert_allclose(sampled(simulated, "loss", rank), session.record.losses(), rtol=1e-8)


def test_products_and_tries_are_compute_spans_on_both_hosts() -> None:
    e = made(2, Newton(iterations=3, tries=2), steps=2, pace=20.0)
    (first, _) = run(e)
    spans = simulate(e, real=True).spans
    mine = spans[(spans["rank"] == 0) & (spans.lane == "compute")]
    engine = sorted((r for r in first.record if r[1] == "compute"), key=lambda r: r[4])
    assert mine.name.tolist() == [r[2] for r in engine] == ["forward", "backward", *["curve"] * 3, "value", "value",
                                                             "update"] * 2  # fmt: skip
    for name, seconds in (("curve", 0.018), ("value", 0.006)):  # of a pace of 20 ms, 6 forward and 12 backward
        of_it = mine[mine.name == name]
        np.testing.assert_allclose(of_it.t1 - of_it.t0, seconds)
        assert min(r[5] - r[4] for r in engine if r[2] == name) >= 0.99 * seconds


@pytest.mark.parametrize("other", ["LocalSGD", "ZeRO1", "KFAC"])
def test_newton_is_switched_to_and_from_live(other: str) -> None:
    changes = [Change(3, "strategy", "Newton"), Change(6, "strategy", other), Change(9, "strategy", "DDP")]
    sessions = run(made(3, DDP(), steps=12, lr=0.02), *changes)
    assert {s.phase for s in sessions} == {"done"}
    assert len({fingerprint([weights(s)]) for s in sessions}) == 1


@pytest.mark.parametrize(("path", "value", "said"), [
    ("compressor", "TopK", "use Dense"), ("partition", {"Pipeline": {"stages": 2}}, "a rank needs all gradients"),
    ("clip", 1.0, "clip=1"),
])  # fmt: skip
def test_settings_that_newton_cannot_use_raise_knob_error(path: str, value: Any, said: str) -> None:
    with pytest.raises(KnobError, match=said):
        made(2, Newton()).set(path, value)
