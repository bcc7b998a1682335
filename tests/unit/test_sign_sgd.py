"""Compares SignSGD with counted votes and EFSignSGD with its rule in numpy, and tests their records."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import batch, exchange, experiment, mse, net, placed, run, together, toy, weights
from workbench.compressors import EFSignSGD, ErrorFeedback, OneBit, SignSGD
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import Change

pytestmark = pytest.mark.ranks


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fresh(ranks: int) -> list[Memory]:
    return [Memory(r) for r in range(ranks)]


def one_step(codec: Any, g: torch.Tensor, memories: list[Memory] | None = None) -> torch.Tensor:
    return exchange(codec, g, placed((g.shape[1],)), memories or fresh(len(g)))


@pytest.mark.parametrize("ranks", [1, 3, 5, 9])
@pytest.mark.parametrize("n", [1, 7, 100, 513])
def test_with_an_odd_number_of_ranks_the_result_is_the_sign_of_the_sum_of_signs(ranks: int, n: int) -> None:
    g = noise(n, ranks, n)
    out = one_step(SignSGD(scale="one"), g)
    np.testing.assert_array_equal(out.numpy(), np.sign(np.sign(g.numpy()).sum(0)))


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_on_equal_votes_the_counting_rank_decides(ranks: int) -> None:
    n = 60 * ranks
    g = noise(ranks, ranks, n)
    votes = np.where(g.numpy() >= 0, 1, -1)
    owner = np.repeat(np.arange(ranks), n // ranks)
    total = votes.sum(0)
    want = np.where(total == 0, votes[owner, np.arange(n)], np.sign(total))
    assert (total == 0).mean() > 0.2, "there are ties to decide"
    np.testing.assert_array_equal(one_step(SignSGD(scale="one"), g).numpy(), want)


@pytest.mark.parametrize("ranks", [2, 4])
def test_votes_on_noise_have_no_drift(ranks: int) -> None:
    n = 40_000
    mean = float(one_step(SignSGD(scale="one"), noise(ranks, ranks, n)).mean())
    assert abs(mean) < 5 / math.sqrt(n)
    ties_for_plus = np.where(np.sign(noise(ranks, ranks, n).numpy()).sum(0) >= 0, 1, -1).mean()
    assert ties_for_plus > 0.3, "what is avoided"


def test_a_majority_overrules_a_few_wrong_ranks() -> None:
    g = noise(1, 1, 300).repeat(5, 1)
    g[3:] *= -1000
    np.testing.assert_array_equal(one_step(SignSGD(scale="one"), g).numpy(), np.sign(g[0].numpy()))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_scale_is_the_mean_magnitude_of_the_inputs(ranks: int) -> None:
    g = noise(2, ranks, 200)
    want = float(g.abs().mean(1).sum())
    np.testing.assert_allclose(one_step(SignSGD(), g).abs().numpy(), want, rtol=1e-6)
    assert set(one_step(SignSGD(scale="one"), g).tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("scale", ["mean", "one"])
def test_zeros_stay_zero_and_non_finite_values_pass_on(scale: str) -> None:
    assert not one_step(SignSGD(scale=scale), torch.zeros(2, 50)).any()
    for bad in (math.nan, math.inf, -math.inf):
        g = noise(3, 3, 50)
        g[1, 7] = bad
        memories = fresh(3)
        assert bool(one_step(SignSGD(scale=scale, momentum=0.9), g, memories).isnan().all())
        assert all(bool(m.buffers["sign_sgd"]["p0"].isfinite().all()) for m in memories)
        assert bool(one_step(SignSGD(scale=scale, momentum=0.9), noise(3, 3, 50), memories).isfinite().all())


@pytest.mark.parametrize("ranks", [1, 3])
def test_with_momentum_it_equals_signum_in_numpy(ranks: int) -> None:
    memories, v = fresh(ranks), np.zeros((ranks, 80))
    for step in range(12):
        g = noise(step, ranks, 80) + 0.3
        v = 0.9 * v + 0.1 * g.double().numpy()
        out = one_step(SignSGD(scale="one", momentum=0.9), g, memories)
        np.testing.assert_array_equal(out.numpy(), np.sign(np.sign(v).sum(0)))


def test_a_momentum_switched_off_and_on_restarts_from_the_present_gradient() -> None:
    memories = fresh(1)
    one_step(SignSGD(momentum=0.5), torch.full((1, 4), 8.0), memories)
    assert memories[0].buffers["sign_sgd"]["p0"].tolist() == [4.0] * 4
    assert one_step(SignSGD(), torch.full((1, 4), -2.0), memories).tolist() == [-2.0] * 4
    assert one_step(SignSGD(momentum=0.5), torch.full((1, 4), 1.0), memories).tolist() == [-0.5] * 4
    assert "sign_sgd" not in _after(SignSGD()).buffers, "without momentum nothing is kept"


def _after(codec: SignSGD) -> Memory:
    memories = fresh(1)
    one_step(codec, noise(1, 1, 10), memories)
    return memories[0]


@pytest.mark.parametrize("codec", [SignSGD(), SignSGD(scale="one"), EFSignSGD(), EFSignSGD(block=64)], ids=str)
def test_the_ranks_contributions_sum_to_the_result(codec: Any) -> None:
    g = noise(4, 3, 301)
    buckets = [Bucket(0, row.clone(), (), 0) for row in g]
    own = together([codec.reduce(Rank(r, 3), b, Memory()) for r, b in enumerate(buckets)])
    torch.testing.assert_close(sum(own), buckets[0].data)


def test_on_noise_a_majority_vote_is_farther_from_the_sum_than_zero_is() -> None:
    """So a residual would grow; error feedback suits its relatives."""
    g = noise(5, 9, 5000)
    vote, signs = one_step(SignSGD(), g), one_step(EFSignSGD(), g)
    exact = g.double().sum(0)
    assert float((vote - exact).norm()) > float(exact.norm()) > float((signs - exact).norm())


def plain_sign_sgd(steps: int, lr: float) -> torch.Tensor:
    """Runs one process that steps by the signs of its gradients."""
    model = net()
    for step in range(steps):
        model.zero_grad()
        mse(model, batch(0, step, 0)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * torch.where(p.grad >= 0, 1.0, -1.0)
    return torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])


def test_one_rank_equals_the_plain_method() -> None:
    task = toy(partial(torch.optim.SGD, lr=0.001))
    session = run(experiment(1, 8, compressor=SignSGD(scale="one"), task=task))[0]
    torch.testing.assert_close(weights(session), plain_sign_sgd(8, 0.001), rtol=1e-5, atol=1e-6)


def formula(session: Any, codec: Any) -> int:
    """Returns the bytes that one of four ranks sends per step."""
    total = 0
    for bucket in session.layout.buckets:
        n = bucket.data.numel()
        if isinstance(codec, SignSGD):
            total += 3 * (4 + 2 * math.ceil(math.ceil(n / 4) / 8))
        else:
            k = math.ceil(n / codec.block) if codec.block else 1
            total += 3 * (4 * k + math.ceil(k * math.ceil(n / k) / 8))
    return total


def test_recorded_bytes_equal_the_formula_before_and_after_live_changes() -> None:
    changes = [Change(3, "compressor.momentum", 0.9), Change(4, "scale", "one"), Change(5, "bucket_mb", 0.02)]
    sessions = run(experiment(4, 8, compressor=SignSGD()), *changes)
    plain = run(experiment(4, 3, compressor=SignSGD()))[0]
    sent = [sum(n for k, _, n in sessions[0].record.comm() if k == step) for step in range(8)]
    assert sent[2] == sent[4] == formula(plain, SignSGD()) and sent[7] == formula(sessions[0], SignSGD())
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    dense = sum(n for step, _, n in run(experiment(4, 3))[0].record.comm() if step == 2)
    assert sent[7] < dense / 30

    sessions = run(experiment(4, 8, compressor=EFSignSGD.usual()), Change(4, "block", 64), Change(6, "bucket_mb", 0.02))
    plain = run(experiment(4, 3, compressor=EFSignSGD.usual()))[0]
    sent = [sum(n for k, _, n in sessions[0].record.comm() if k == step) for step in range(8)]
    assert sent[2] == formula(plain, EFSignSGD()) and sent[5] == formula(plain, EFSignSGD(block=64)) > sent[2]
    assert sent[7] == formula(sessions[0], EFSignSGD(block=64))


@pytest.mark.parametrize("codec", [SignSGD(), SignSGD(momentum=0.9), EFSignSGD()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_buckets_keep_their_dtype_and_an_empty_one_is_not_exchanged(codec: Any, dtype: torch.dtype) -> None:
    buckets = [Bucket(0, noise(r, 100).to(dtype), tuple(placed((100,))), 0) for r in range(2)]
    own = together([codec.reduce(Rank(r, 2), b, Memory()) for r, b in enumerate(buckets)])
    assert all(b.data.dtype == dtype for b in buckets)
    exact = torch.float32 if isinstance(codec, EFSignSGD) else dtype  # error feedback subtracts it before rounding
    assert all(row.dtype == exact for row in own)
    assert torch.equal(buckets[0].data, buckets[1].data)
    empty = [codec.reduce(Rank(r, 2), Bucket(0, torch.zeros(0), (), 0), Memory()) for r in (0, 1)]
    assert together(empty) == [None, None]


# -- EFSignSGD --


@pytest.mark.parametrize("power", [1, 3])
def test_the_error_of_one_step_follows_from_its_signs(power: int) -> None:
    x = noise(7, 1, 4096).double() ** power
    phi = float(x.abs().sum() ** 2 / (4096 * x.square().sum()))
    off = one_step(EFSignSGD(), x.float()) - x[0]
    assert float(off.square().sum() / x.square().sum()) == pytest.approx(1 - phi, rel=1e-4)


def test_signs_of_normal_numbers_keep_two_over_pi_of_the_energy() -> None:
    x = noise(8, 1, 200_000)
    off = one_step(EFSignSGD(), x) - x[0]
    assert 1 - float(off.square().sum() / x.double().square().sum()) == pytest.approx(2 / math.pi, abs=0.005)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_under_error_feedback_it_equals_the_rule_in_numpy(ranks: int) -> None:
    memories, error = fresh(ranks), np.zeros((ranks, 90))
    for step in range(8):
        g = noise(step, ranks, 90)
        x = g.double().numpy() + error
        sent = np.abs(x).mean(1, keepdims=True) * np.where(x >= 0, 1, -1)
        error = x - sent
        np.testing.assert_allclose(one_step(EFSignSGD.usual(), g, memories).numpy(), sent.sum(0), rtol=1e-4, atol=1e-5)


def test_it_leaves_less_unsent_than_two_hops() -> None:
    left = {}
    for codec in (EFSignSGD(), OneBit()):
        memories = fresh(4)
        for step in range(60):
            one_step(ErrorFeedback(of=codec), noise(step, 4, 512), memories)
        left[type(codec)] = float(sum(m.buffers["residual"]["p0"] for m in memories).norm())
    assert left[EFSignSGD] < 0.8 * left[OneBit]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_affects_only_its_block_and_leaves_no_residual(bad: float) -> None:
    g, memories = noise(2, 2, 512), fresh(2)
    g[1, 5] = bad
    out = one_step(EFSignSGD(block=64), g)
    assert bool(out[:64].isnan().all()) and bool(out[64:].isfinite().all())
    one_step(EFSignSGD.usual(), g, memories)
    assert all(bool(m.buffers["residual"]["p0"].isfinite().all()) for m in memories)


@pytest.mark.parametrize("codec", [SignSGD(momentum=0.9), EFSignSGD.usual()], ids=str)
def test_it_trains(codec: Any) -> None:
    rest = {"task": toy(partial(torch.optim.SGD, lr=0.05)), "eval_every": 100}
    session = run(experiment(2, 101, compressor=codec, **rest))[0]
    held = [v for _, name, _, v in session.record.samples if name == "held_out"]
    assert held[-1] < 0.7 * held[0], held
