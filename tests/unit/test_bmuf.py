"""Tests BMUF against the papers' formulas, and SlowMo at a constant learning rate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ranks import experiment, run, weights
from tests.sim.virtual import samples
from tests.unit.plain_outer import MOMENTUM, Plain
from workbench import simulate
from workbench.fabric import traffic
from workbench.settings import Change, KnobError
from workbench.strategies import BMUF, LocalSGD, SlowMo

pytestmark = pytest.mark.ranks

every_form = pytest.mark.parametrize("form", ["classical", "nesterov"])


def reference(form: str, eta: float, zeta: float, every: int, blocks: int, ranks: int = 3) -> Plain:
    """Keeps W and delta separately, and begins each block from both."""
    plain = Plain(ranks, MOMENTUM)
    w = begin = plain.get()[0]
    delta = torch.zeros_like(w)
    for _ in range(blocks):
        plain.train(every)
        delta = eta * delta + zeta * (plain.get().mean(0) - begin)
        w = w + delta
        begin = w + eta * delta if form == "nesterov" else w
        plain.put(begin)
    return plain


@every_form
def test_bmuf_follows_the_papers_formulas(form: str) -> None:
    sessions = run(experiment(3, 12, strategy=BMUF(form=form, eta=0.6, zeta=0.9, every=3)))
    want = reference(form, 0.6, 0.9, 3, 4).get()[0]
    for s in sessions:
        torch.testing.assert_close(weights(s), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("eta", "zeta"), [(0.75, 1.0), (0.5, 0.6)])
def test_at_a_constant_rate_bmuf_is_slowmo(eta: float, zeta: float) -> None:
    mine, slow = (run(experiment(3, 12, strategy=s)) for s in (BMUF(eta=eta, zeta=zeta), SlowMo(beta=eta, alpha=zeta)))
    torch.testing.assert_close(weights(mine[0]), weights(slow[0]), rtol=1e-5, atol=1e-6)


def test_at_a_falling_rate_bmuf_is_not_slowmo() -> None:
    """The rest of delta keeps its length; the rest of u is scaled by the rate."""
    fall = Change(8, "lr", 0.002)
    mine, slow = (run(experiment(3, 12, strategy=s), fall) for s in (BMUF(eta=0.6), SlowMo(beta=0.6)))
    assert (weights(mine[0]) - weights(slow[0])).norm() > 1e-3


def test_without_momentum_bmuf_is_local_sgd() -> None:
    mine, plain = (run(experiment(3, 12, strategy=s)) for s in (BMUF(eta=0.0, every=4), LocalSGD(every=4)))
    assert torch.equal(weights(mine[0]), weights(plain[0]))


def test_bmuf_sends_the_model_once_a_block() -> None:
    s = run(experiment(4, 9, strategy=BMUF(every=4)))[0]
    buckets = sum(traffic("all_reduce", b.nbytes, 4)[0] for b in s.layout.buckets)
    by_step = {step: sum(sent for at, _, sent in s.record.comm() if at == step) for step in range(9)}
    assert by_step == {step: buckets if step in (3, 7) else 0 for step in range(9)}


@every_form
def test_leaving_in_a_block_gives_the_mean(form: str) -> None:
    changes = Change(6, "lr", 1e-30), Change(6, "strategy", "DDP")
    mine = run(experiment(3, 7, strategy=BMUF(form=form, eta=0.6, every=4)), *changes)
    plain = reference(form, 0.6, 1.0, 4, 1)
    plain.train(2)
    torch.testing.assert_close(weights(mine[0]), plain.get().mean(0), rtol=1e-5, atol=1e-6)


@every_form
def test_the_simulator_trains_the_same(form: str) -> None:
    e = experiment(3, 10, strategy=BMUF(every=3, form=form))
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s in run(e):
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-5)


@pytest.mark.parametrize(("knob", "value"), [("every", 0), ("eta", 1.0), ("zeta", -1), ("form", "heavy")])
def test_invalid_settings_are_refused_with_a_reason(knob: str, value: object) -> None:
    with pytest.raises(KnobError, match=f"strategy.{knob}=.*must be"):
        experiment(2, strategy=BMUF()).set(f"strategy.{knob}", value)
