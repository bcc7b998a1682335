"""Compares QAdam with torch's Adam, and after its warm-up with momentum SGD with a fixed scale per element."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import batch, experiment, mse, net, run, toy, weights
from tests.sim.virtual import begun, comm, paced, samples, seconds, stack
from tests.unit.test_verb_grads import Idle
from workbench import simulate
from workbench.compressors import ByteGrad, Cast, Compressor, Dense, ErrorFeedback, OneBit, PowerSGD, TopK
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, OneBitAdam, QAdam

pytestmark = pytest.mark.ranks

SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def joined(ranks: int, steps: int, warm: int, lr: float = 0.02, decay: float = 0.0) -> torch.Tensor:
    """The reference in one process on the joined batch: torch's AdamW for `warm` steps, then with its v frozen."""
    model = net()
    named = sorted(model.named_parameters())
    adam = torch.optim.AdamW([p for _, p in named], lr=lr, weight_decay=decay)
    for step in range(steps):
        pairs = [batch(r, step, 0) for r in range(ranks)]
        adam.zero_grad()
        mse(model, (torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs]))).backward()
        if step < warm:
            adam.step()
            continue
        with torch.no_grad():
            for _, p in named:
                m, v = adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"]
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                scale = 1 / ((v / (1 - 0.999**warm)).sqrt() + 1e-8)
                p.mul_(1 - lr * decay).sub_(lr / (1 - 0.9 ** (step + 1)) * scale * m)
    return torch.cat([p.detach().reshape(-1).double() for _, p in named])


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_before_the_freeze_it_equals_adam_on_the_joined_batch(ranks: int, decay: float) -> None:
    for s in run(experiment(ranks, 10, strategy=QAdam(weight_decay=decay))):
        torch.testing.assert_close(weights(s), joined(ranks, 10, 10, decay=decay), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("ranks", "warm"), [(1, 4), (3, 3), (4, 9)])
def test_after_the_freeze_with_dense_it_is_momentum_sgd_with_fixed_scale(ranks: int, warm: int, scaled: bool) -> None:
    sessions = run(experiment(ranks, 10, strategy=QAdam(warmup=warm, scaled=scaled)))
    for s in sessions:
        torch.testing.assert_close(weights(s), joined(ranks, 10, warm), rtol=1e-4, atol=1e-5)
    if warm == 4:
        assert float((weights(sessions[0]) - joined(ranks, 10, 10)).abs().max()) > 1e-3, "or the freeze does nothing"


def test_the_gradient_of_the_last_warm_up_step_is_in_both_moments() -> None:
    """Bagua's optimizer leaves it out, so after a warm-up of one step both moments would be empty."""
    (session,) = run(experiment(1, 1, strategy=QAdam(warmup=1)))
    model = net()
    mse(model, batch(0, 0, 0)).backward()
    memory = session.state.memory
    for name, p in model.named_parameters():
        torch.testing.assert_close(memory.buffers["m"][name], 0.1 * p.grad.view(-1))
        torch.testing.assert_close(memory.buffers["v"][name], 0.001 * p.grad.view(-1) ** 2)


COARSE: list[Compressor] = [
    ByteGrad(bits=4, block=64), Cast(), TopK(density=0.1), PowerSGD.usual(), OneBit.usual(),
]  # fmt: skip


@pytest.mark.parametrize("compressor", COARSE, ids=str)
def test_with_any_compressor_of_momenta_ranks_stay_bit_identical(compressor: Compressor) -> None:
    e = experiment(3, 10, strategy=QAdam(warmup=4, scaled=True), compressor=compressor)
    sessions = run(e)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    moments = [
        torch.cat([s.state.memory.buffers[k][n] for k in "mv" for n in sorted(s.state.memory.buffers[k])])
        for s in sessions
    ]
    assert torch.equal(moments[0], moments[1]) and torch.equal(moments[0], moments[2])
    assert not torch.equal(weights(sessions[0]), joined(3, 10, 4))
    for real in (False, True):
        simulated = simulate(e.set("pace", 1.0), real=real)
        for s in sessions:
            assert comm(simulated, s.rank.index) == begun(s.record)
    np.testing.assert_allclose(samples(simulated, "loss", 1)[:5], sessions[1].record.losses()[:5], rtol=1e-4)


def test_bytes_are_dense_in_the_warm_up_and_compressed_after_it() -> None:
    session = run(experiment(4, 8, strategy=QAdam(warmup=5), compressor=ByteGrad()))[0]
    sizes = [b.nbytes for b in session.layout.buckets]
    sent = [sum(n for k, _, n in session.record.comm() if k == step) for step in range(8)]
    assert sent[1:5] == [sum(traffic("all_reduce", n, 4)[0] for n in sizes)] * 4
    assert sent[5:] == [sum(2 * 3 * (math.ceil(n / 4 / 4) + 8) for n in sizes)] * 3


def test_with_8_bits_it_learns_as_well_as_with_dense() -> None:
    held = {}
    for c in (Dense(), ByteGrad()):
        e = experiment(2, 81, strategy=QAdam(warmup=20), compressor=c, eval_every=80, lr=0.005)
        session = run(e)[0]
        held[str(c)] = [v for _, name, _, v in session.record.samples if name == "held_out"]
    assert all(h[-1] < 0.6 * h[0] for h in held.values())
    assert held[str(ByteGrad())][-1] == pytest.approx(held["Dense()"][-1], rel=0.1)


def test_live_changes_of_the_warm_up_freeze_and_unfreeze_v() -> None:
    def v(*changes: Change, steps: int) -> torch.Tensor:
        (session,) = run(experiment(1, steps, strategy=QAdam(warmup=5)), *changes)
        return torch.cat([x for _, x in sorted(session.state.memory.buffers["v"].items())])

    assert torch.equal(v(steps=9), v(steps=5))
    assert torch.equal(v(Change(3, "warmup", 1), steps=9), v(steps=3))
    thawed = v(Change(7, "warmup", 100), steps=9)
    assert not torch.equal(thawed, v(steps=5))


def test_live_changes_of_betas_keep_the_bias_correction_exact() -> None:
    """With the same gradient in every step, m_hat is that gradient for any betas in earlier steps."""
    same = toy(data=lambda rank, ranks, seed: [batch(0, 0, 0)] * 64)
    changes = [Change(2, "beta1", 0.5), Change(3, "beta2", 0.9), Change(5, "beta1", 0.99)]
    e = experiment(1, 7, task=same, strategy=QAdam(), lr=1e-30)
    (session,) = run(e, *changes)
    model, state = net(), session.state
    mse(model, batch(0, 0, 0)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(state.memory.buffers["m"][name] / state.m_weight, p.grad.view(-1))
        torch.testing.assert_close(state.memory.buffers["v"][name] / state.v_weight, p.grad.view(-1) ** 2)


def test_another_bucket_size_keeps_both_moments() -> None:
    e = experiment(2, 10, strategy=QAdam(warmup=5))
    changed = run(e, Change(3, "bucket_mb", 0.02), Change(7, "bucket_mb", 1.0))
    torch.testing.assert_close(weights(changed[0]), weights(run(e)[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compressor", [ByteGrad(), OneBit.usual()], ids=str)
def test_a_parameter_without_gradients_does_not_move(compressor: Compressor) -> None:
    """A code has no zero. Divided by the root of v, which is 0, even the smallest number would be a large step."""
    task = toy(model=lambda: net(Idle))
    for s in run(experiment(3, 8, task=task, strategy=QAdam(warmup=3), compressor=compressor)):
        first = dict(net(Idle).named_parameters())
        for name, p in s.model.named_parameters():
            assert torch.equal(p, first[name]) == name.startswith("idle")


def test_the_tasks_optimizer_is_idle_and_a_switch_keeps_the_parameters() -> None:
    still = [Change(4, "lr", 1e-30), Change(5, "strategy", {"QAdam": {"warmup": 2}}), Change(10, "strategy", "DDP")]
    stay = run(experiment(3, 5, strategy=DDP()), *still[:1])
    went = run(experiment(3, 10, strategy=DDP()), *still)
    for s, want in zip(went, stay, strict=True):
        torch.testing.assert_close(weights(s), weights(want), rtol=1e-6, atol=1e-7)
        mine, theirs = (x.optimizer.state_dict()["state"] for x in (s, want))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k]["momentum_buffer"], theirs[k]["momentum_buffer"]) for k in theirs)
    back = run(experiment(3, 12, strategy=DDP()), *still)
    assert len({hash_model_state(s.layout) for s in back}) == 1


@pytest.mark.parametrize("after", ["DDP", "OneBitAdam"])
def test_the_residual_of_momenta_is_dropped_at_a_switch_and_recorded(after: str) -> None:
    e = experiment(2, 10, strategy=QAdam(warmup=2), compressor=TopK.usual())
    for s in run(e, Change(7, "strategy", after)):
        (mark,) = s.record.noted("residual")
        detail = json.loads(mark[-1])
        assert detail["unit"] == "moments" and detail["dropped"] > 0
        left = s.rank.memory.buffers.get("residual")
        assert (left is None) == (after == "OneBitAdam"), "DDP has made one of gradients; a new warm-up none yet"


def test_the_exchange_overlaps_with_backward_as_under_ddp() -> None:
    def step(strategy: Any) -> float:
        return float(np.median(seconds(simulate(paced(4, 8, strategy=strategy, task=stack(8, 100), mbit=1000.0)))))

    warm, frozen, plain = step(QAdam()), step(QAdam(warmup=1)), step(DDP())
    wire = 8 * traffic("all_reduce", 40_000, 4)[0] * 8 / 1e9
    assert warm == frozen == plain < 10e-3 + wire / 2


@pytest.mark.parametrize(("knob", "value", "allowed"), [
    ("warmup", 0, r"\[1, 1e\+06\]"), ("beta1", 1.0, r"\[0, 0.9999\]"), ("beta2", 1.0, r"\[0, 0.999999\]"),
    ("eps", 0.0, r"\[1e-12, 1\]"),
])  # fmt: skip
def test_a_value_out_of_range_raises_knob_error_with_the_range(knob: str, value: float, allowed: str) -> None:
    with pytest.raises(KnobError, match=rf"strategy.{knob}={value}.*{allowed}"):
        experiment(strategy=QAdam()).set(f"strategy.{knob}", value)


def test_it_takes_any_compressor_but_1_bit_adam_needs_error_feedback() -> None:
    for c in COARSE:
        experiment(strategy=QAdam(), compressor=c)
    e = experiment(strategy=QAdam(), compressor=ByteGrad())
    with pytest.raises(KnobError, match=r"compressor=ByteGrad: OneBitAdam needs .* use ErrorFeedback\(of=ByteGrad"):
        e.set("strategy", OneBitAdam())
    e.set("compressor", ErrorFeedback(of=ByteGrad())).set("strategy", OneBitAdam())
