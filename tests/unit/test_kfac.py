"""Tests KFAC against its papers' formulas in numpy, in one process with all examples, and live."""

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
from workbench.fabric import traffic
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, KFAC
from workbench.strategies.second_order._kronecker import Layer, assign_layers

pytestmark = pytest.mark.ranks
LR, MOMENTUM = 0.1, 0.9


class Mixed(nn.Module):
    """Two Linear layers and a scale outside KFAC, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.b = nn.Linear(8, 6), nn.Parameter(torch.ones(6)), nn.Linear(6, 4, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale)


def data(rank: int, ranks: int, seed: int) -> list[Any]:
    return [tuple(x.double() for x in batch(rank, step, seed, 16)) for step in range(64)]


TASK = toy(optimizer=partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM), model=partial(net, Mixed), data=data,
           evaluate=None)  # fmt: skip


class Reference:
    """One process with all examples: Martens and Grosse 2015, sections 4.2, 5 and 6.3, with KAISA's clipping."""

    def __init__(self, k: KFAC) -> None:
        self.k = k
        model = net(Mixed)
        self.w = {name: p.detach().numpy() for name, p in model.named_parameters()}
        self.speed = {name: np.zeros_like(w) for name, w in self.w.items()}
        self.factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.inverses: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.steps = self.folded = 0

    def step(self, x: np.ndarray, y: np.ndarray) -> None:
        w, k, n = self.w, self.k, len(x)
        one = np.hstack([x, np.ones((n, 1))])
        squashed = np.tanh(one @ np.hstack([w["a.weight"], w["a.bias"][:, None]]).T)
        hidden = squashed * w["scale"]
        out = 2 * (hidden @ w["b.weight"].T - y) / y.shape[1]  # (n, 4): the gradient of each row's own loss
        back = out @ w["b.weight"]
        inner = back * w["scale"] * (1 - squashed**2)
        grads = {"a": inner.T @ one / n, "b": out.T @ hidden / n}
        plain = (back * squashed).mean(0)
        if self.steps % k.factors_every == 0 or self.steps < k.warmup:
            self.folded += 1
            old = min(1 - 1 / self.folded, k.decay)
            for name, fed, slope in (("a", one, inner), ("b", hidden, out)):
                new = fed.T @ fed / n, slope.T @ slope / n
                was = self.factors.get(name, new)
                self.factors[name] = tuple(old * f + (1 - old) * g for f, g in zip(was, new, strict=True))
        self.steps += 1
        if (since := self.steps - k.warmup - 1) >= 0:
            if since % k.inverses_every == 0:
                self.invert()
            made = {name: self.inverses[name][1] @ g @ self.inverses[name][0] for name, g in grads.items()}
            bends = sum((made[name] * g).sum() for name, g in grads.items())
            nu = min(1.0, (k.kl_clip / (LR**2 * bends)) ** 0.5) if k.kl_clip else 1.0
            grads = {name: nu * d for name, d in made.items()}
        all_of = {"a.weight": grads["a"][:, :-1], "a.bias": grads["a"][:, -1], "scale": plain, "b.weight": grads["b"]}
        for name, g in all_of.items():
            self.speed[name] = MOMENTUM * self.speed[name] + g
            w[name] = w[name] - LR * self.speed[name]

    def invert(self) -> None:
        for name, (a, g) in self.factors.items():
            pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
            root = np.sqrt(self.k.damping)
            self.inverses[name] = (np.linalg.inv(a + pi * root * np.eye(len(a))),
                                   np.linalg.inv(g + root / pi * np.eye(len(g))))  # fmt: skip

    def after(self, steps: int, ranks: int) -> np.ndarray:
        k = self.k.accumulate
        for step in range(steps):
            pairs = [data(r, ranks, 0)[step * k + micro] for micro in range(k) for r in range(ranks)]
            self.step(*(torch.cat(xs).numpy() for xs in zip(*pairs, strict=True)))
        return np.concatenate([self.w[name].ravel() for name in sorted(self.w)])


def made(ranks: int, k: KFAC, **rest: Any) -> Experiment:
    return experiment(ranks, 20, task=TASK, strategy=k, **rest)


@pytest.mark.parametrize(("ranks", "k"), [
    (1, KFAC(kl_clip=0.0, damping=0.1)),
    (4, KFAC(warmup=2, factors_every=3, inverses_every=4)),
    (4, KFAC(fraction=0.5, factors_every=1, inverses_every=1, decay=0.5, kl_clip=0.1)),
    (4, KFAC(fraction=0.25, damping=0.03, kl_clip=1.0)),
    (3, KFAC(fraction=0.5, accumulate=2, factors_every=2, inverses_every=3, kl_clip=0.01)),
], ids=str)  # fmt: skip
def test_all_ranks_together_equal_one_process_with_all_examples(ranks: int, k: KFAC) -> None:
    want = Reference(k).after(20, ranks)
    for session in run(made(ranks, k)):
        np.testing.assert_allclose(weights(session), want, rtol=1e-9, atol=1e-11)


def test_clipping_changes_the_step() -> None:
    bold, careful = (Reference(KFAC(kl_clip=clip)).after(20, 4) for clip in (0.1, 1e-3))
    assert np.abs(bold - careful).max() > 0.1


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_keepers_of_inverses_do_not_change_the_result(ranks: int) -> None:
    ends = [fingerprint([weights(s)]) for f in (1.0, 0.5, 1 / ranks) for s in run(made(ranks, KFAC(fraction=f)))]
    assert len(set(ends)) == 1


def test_the_keepers_of_inverses_can_change_live() -> None:
    changes = [Change(5, "strategy.fraction", 0.25), Change(11, "strategy.fraction", 0.5)]
    steady, turned = run(made(4, KFAC(inverses_every=1))), run(made(4, KFAC(inverses_every=1)), *changes)
    assert len({fingerprint([weights(s)]) for s in (*steady, *turned)}) == 1
    assert len({name for _, name, _ in turned[0].record.comm() if "inverses" in name}) == 2, "groups of 4 and of 2"


def test_factors_are_symmetric_nonnegative_and_equal_on_all_ranks() -> None:
    sessions = run(made(3, KFAC()))
    for name in ("inputs", "outputs"):
        for weight, first in sessions[0].state.memory.parts[name].items():
            assert torch.equal(first, first.T)
            assert float(torch.linalg.eigvalsh(first)[0]) > -1e-12 * float(first.diagonal().max())
            assert all(torch.equal(first, s.state.memory.parts[name][weight]) for s in sessions)


def exact(rank: int, ranks: int, seed: int) -> list[Any]:
    """Pairs every input with every error, so second moments of products are products of second moments."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((24, 4))
    errors = np.linalg.qr(rng.standard_normal((6, 3)))[0] * 6**0.5  # E[e e^T] = I
    at_first = net(partial(nn.Linear, 4, 3, bias=False, dtype=torch.float64)).weight.detach().numpy()
    every = [(a, at_first @ a - e) for a in x for e in errors]
    mine = [every[i] for i in range(rank, len(every), ranks)]
    pair = tuple(torch.from_numpy(np.stack(part)) for part in zip(*mine, strict=True))
    return [pair] * 8


def test_with_kronecker_blocks_a_step_is_the_exact_gauss_newton_step() -> None:
    """Linear least squares with white gradients that are independent of the inputs: one step is the solution."""
    task = toy(optimizer=partial(torch.optim.SGD, lr=1.0), data=exact, evaluate=None,
               model=partial(net, partial(nn.Linear, 4, 3, bias=False, dtype=torch.float64)),
               loss=lambda model, pair: (model(pair[0]) - pair[1]).square().sum(1).mean() / 2)  # fmt: skip
    k = KFAC(damping=1e-10, kl_clip=0.0, warmup=1)
    warm = [Change(1, "lr", 1.0)]
    sessions = run(experiment(2, 2, task=task, strategy=k, lr=1e-12), *warm)
    x, y = (np.concatenate([exact(r, 2, 0)[0][i] for r in range(2)]) for i in range(2))
    best = np.linalg.lstsq(x, y, rcond=None)[0].T
    start = net(partial(nn.Linear, 4, 3, bias=False)).weight.detach().numpy()
    assert np.abs(best - start).max() > 0.1
    for session in sessions:
        np.testing.assert_allclose(session.model.weight.detach(), best, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_are_dealt_out_by_cost(ranks: int) -> None:
    """Graham 1969: the largest job first, each to the least loaded rank, is within 4/3 of the optimum."""
    layers = [Layer(str(n), "", n, 3) for n in (40, 64, 20, 33, 64, 50, 12)]
    owner = assign_layers(layers, ranks)
    cost = {x.weight + str(i): x.inputs**3 + x.outputs**3 for i, x in enumerate(layers)}
    assert set(owner) == {x.weight for x in layers}
    spread = assign_layers([x._replace(weight=w) for w, x in zip(cost, layers, strict=True)], ranks)
    mine = max(sum(cost[w] for w, r in spread.items() if r == rank) for rank in range(ranks))
    best = min(
        max(sum(c for c, r in zip(cost.values(), who, strict=True) if r == rank) for rank in range(ranks))
        for who in np.ndindex(*[ranks] * len(layers))
    )
    assert best <= mine <= 4 / 3 * best


def test_ranks_send_half_of_the_factors_and_half_of_the_inverses() -> None:
    (first, *_) = run(made(4, KFAC(warmup=1, factors_every=100, inverses_every=100)))
    comm = [row for row in first.record.comm() if "bucket" not in row[1]]
    half = {"a": 9 * 10 // 2 + 6 * 7 // 2, "b": 6 * 7 // 2 + 4 * 5 // 2}  # elements of 8 bytes, of layers a and b
    factors = ("all_reduce factors", traffic("all_reduce", 8 * sum(half.values()), 4)[0])
    inverses = [("broadcast inverses", traffic("broadcast", 8 * n, 4)[0]) for n in half.values()]
    assert [row[1:] for row in comm] == [factors, *inverses] and [row[0] for row in comm] == [0, 1, 1]
    (first, *_) = run(made(4, KFAC(warmup=1, fraction=0.25, factors_every=100)))
    sent = [traffic("broadcast", 8 * n, 4)[0] for n in (6 * 9, 4 * 6)]
    assert [n for step, name, n in first.record.comm() if step == 3 and "preconditioned" in name] == sent


@pytest.mark.parametrize("other", ["LocalSGD", "ZeRO3", "DDP"])
def test_switching_in_starts_as_data_parallelism_and_out_leaves_no_state(other: str) -> None:
    stay = [Change(4, "strategy", {"KFAC": {"warmup": 3, "factors_every": 1}}), Change(12, "strategy", other)]
    sessions = run(made(3, DDP()), *stay)
    assert len({fingerprint([weights(s)]) for s in sessions}) == 1 or other == "LocalSGD"
    assert sessions[0].state is None or not getattr(sessions[0].state, "layers", None)
    until = {n: run(made(3, DDP()).set("steps", n), *stay[:1])[0] for n in (7, 8)}
    plain = {n: run(made(3, DDP()).set("steps", n))[0] for n in (7, 8)}
    assert torch.equal(weights(until[7]), weights(plain[7])), "three steps by the plain gradient"
    assert not torch.equal(weights(until[8]), weights(plain[8]))


def test_engine_and_simulator_send_and_keep_the_same() -> None:
    e = made(3, KFAC(fraction=0.34, factors_every=2, inverses_every=3), pace=5.0)
    sessions = run(e)
    for real in (False, True):
        crosses_alike(simulate(e, real=real), sessions)
    memory_alike(e, sessions)
    # fp64 factors and inverses of both layers, if one rank keeps both
    own = 8 * (2 * (9 * 9 + 6 * 6) + 2 * (6 * 6 + 4 * 4))
    most = max(sampled(simulate(e, real=True), "memory strategy state", rank)[-1] for rank in range(3))
    assert own / 2 < most <= own


def test_the_simulator_has_the_engines_losses() -> None:
    e = made(4, KFAC())
    losses = [s.record.losses() for s in run(e)]
    simulated = simulate(e.set("pace", 5.0), real=True)
    for rank, own in enumerate(losses):
        np.testing.assert_allclose(sampled(simulated, "loss", rank), own, rtol=1e-9)


def test_the_share_of_preconditioned_parameters_is_recorded() -> None:
    linear, rest = 8 * 6 + 6 + 6 * 4, 6
    said = sampled(simulate(made(2, KFAC(), pace=5.0)), "preconditioned", 0)
    assert said[0] == pytest.approx(linear / (linear + rest))


def test_a_diverged_model_stays_nan_without_an_error() -> None:
    def lost() -> nn.Module:
        model = net(Mixed)
        model.a.weight.data[0, 0] = torch.nan
        return model

    task = toy(model=lost, data=data, evaluate=None)
    found = simulate(experiment(2, 12, task=task, strategy=KFAC(), pace=5.0), real=True)
    assert np.isnan(sampled(found, "loss", 0)).all() and len(sampled(found, "loss", 0)) == 12


@pytest.mark.parametrize(("field", "said"), [
    ({"compressor": "DGC"}, "DDP"), ({"partition": {"Pipeline": {"stages": 2}}}, "a rank needs all gradients"),
])  # fmt: skip
def test_unsupported_settings_are_refused_with_a_reason(field: dict[str, Any], said: str) -> None:
    e = experiment(2, 4, strategy=KFAC())
    ((path, value),) = field.items()
    with pytest.raises(KnobError, match=said):
        e.set(path, value)
