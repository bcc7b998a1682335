"""Compares OneBit and its error feedback over both hops with the rules in numpy."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, weights
from workbench.compressors import Dense, ErrorFeedback, OneBit
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Memory
from workbench.settings import Change

pytestmark = pytest.mark.ranks


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sign(x: np.ndarray, scale: str) -> np.ndarray:
    """(..., n) -> C(x), with a scale for each row."""
    size = np.abs(x).mean(-1, keepdims=True) if scale == "mean" else np.sqrt((x * x).mean(-1, keepdims=True))
    return np.where(x >= 0, size, -size)


def two_residuals(steps: list[np.ndarray], scale: str) -> tuple[list[np.ndarray], list[float]]:
    """Applies 1-bit Adam's rule: a worker residual before the first hop, a server residual after it; p divides n.

    Returns the output of each step, and the norm of the final residuals.
    """
    p, n = steps[0].shape
    worker, server = np.zeros((p, p, n // p)), np.zeros((p, n // p))
    out, left = [], []
    for g in steps:
        x = g.reshape(p, p, -1) + worker
        sent = sign(x, scale)
        worker = x - sent
        total = sent.sum(0) + server
        out.append(sign(total, scale).reshape(-1))
        server = total - out[-1].reshape(p, -1)
        left.append(float(np.linalg.norm(worker.sum(0) + server)))
    return out, left


def one_residual(steps: list[np.ndarray], scale: str) -> list[np.ndarray]:
    """Applies our rule: rank j's residual of chunk j also takes the error of coding the sum."""
    p, n = steps[0].shape
    residual, out = np.zeros((p, p, n // p)), []
    for g in steps:
        x = g.reshape(p, p, -1) + residual
        sent = sign(x, scale)
        total = sent.sum(0)
        out.append(sign(total, scale).reshape(-1))
        residual = x - sent
        for j in range(p):
            residual[j, j] += total[j] - out[-1].reshape(p, -1)[j]
    return out


def momenta(ranks: int, n: int, count: int, heavy: bool = False) -> list[np.ndarray]:
    """Returns moving averages of noisy gradients with a common part: one per rank."""
    common, m, out = noise(1, n), torch.zeros(ranks, n), []
    for step in range(count):
        g = common + noise(100 + step, ranks, n)
        m = 0.9 * m.mean(0) + 0.1 * (g**5 if heavy else g)
        out.append((m / ranks).double().numpy())
    return out


@pytest.mark.parametrize("scale", ["mean", "rms"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_bit_equals_the_rule_in_numpy(ranks: int, scale: str) -> None:
    steps, n = momenta(ranks, 64 * ranks, 8), 64 * ranks
    memories = [Memory() for _ in range(ranks)]
    of = ErrorFeedback(of=OneBit(scale=scale))
    got = [exchange(of, torch.tensor(g).float(), placed((n,)), memories).numpy() for g in steps]
    for a, b in zip(got, one_residual(steps, scale), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("scale", ["mean", "rms"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_residual_leaves_at_most_20_percent_more_unsent_than_two(ranks: int, scale: str, heavy: bool) -> None:
    steps = momenta(ranks, 512, 200, heavy)
    _, two = two_residuals(steps, scale)
    memories, left = [Memory() for _ in range(ranks)], []
    for g in steps:
        exchange(ErrorFeedback(of=OneBit(scale=scale)), torch.tensor(g).float(), placed((512,)), memories)
        left.append(float(sum(m.buffers["residual"]["p0"] for m in memories).norm()))
    assert np.mean(left[50:]) < 1.2 * np.mean(two[50:])


@pytest.mark.parametrize("block", [0, 64])
def test_nothing_is_lost_over_both_hops_while_everything_changes(block: int) -> None:
    """Checks the main invariant while chunks change their owner, because ranks and buckets change all the time."""
    rng, parts, ranks = random.Random(block), placed(*[(31,), (6, 7)] * 4), 4
    n = parts[-1].stop
    memories, sent, owed = [Memory() for _ in range(ranks)], torch.zeros(n).double(), torch.zeros(n).double()
    for step in range(100):
        g = noise(step, ranks, n)
        owed += g.double().sum(0)
        cut = rng.choice([1, 2, 3, 8])
        of = ErrorFeedback(of=OneBit(scale=rng.choice(["mean", "rms"]), block=block))
        for b in range(0, len(parts), cut):
            group = parts[b : b + cut]
            sent[group[0].start : group[-1].stop] += exchange(of, g, group, memories)
    left = torch.cat([sum(m.buffers["residual"][p.name] for m in memories) for p in parts]).double()
    torch.testing.assert_close(sent + left, owed, rtol=1e-4, atol=1e-2)
    exchange(ErrorFeedback(of=Dense()), torch.zeros(ranks, n), parts, memories)
    assert not any(m.buffers["residual"][p.name].any() for m in memories for p in parts), "one dense step sends it all"


def test_a_constant_gradient_arrives_on_average() -> None:
    g, memories = noise(1, 3, 300), [Memory() for _ in range(3)]
    total = torch.zeros(300).double()
    errors = {}
    for step in range(1, 401):
        total += exchange(OneBit.usual(), g, placed((300,)), memories)
        errors[step] = float((total / step - g.double().sum(0)).norm() / g.double().sum(0).norm())
    assert errors[1] > 0.3 and errors[400] < 0.04


@pytest.mark.parametrize("shape", [lambda x: x, lambda x: x**3], ids=["normal", "cubed"])
def test_the_error_of_one_hop_follows_from_its_scale(shape: object) -> None:
    x = shape(noise(7, 4096)).double()
    phi = float(x.abs().sum() ** 2 / (4096 * x.square().sum()))
    for scale, share in (("mean", 1 - phi), ("rms", 2 - 2 * math.sqrt(phi))):
        out = exchange(OneBit(scale=scale), x[None].float(), placed((4096,)), [Memory()])
        assert float((out - x).square().sum() / x.square().sum()) == pytest.approx(share, rel=1e-3)


def test_with_a_dominant_element_the_rms_scale_is_worse_than_sending_nothing() -> None:
    x = torch.zeros(1, 100)
    x[0, 3] = 1.0
    off = {s: float((exchange(OneBit(scale=s), x, placed((100,)), [Memory()]) - x[0]).norm()) for s in ("mean", "rms")}
    assert off["mean"] < 1.0 < off["rms"]


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_result_scales_with_the_input(scale: float) -> None:
    for of in (OneBit(), OneBit(scale="rms")):
        out = exchange(of, noise(1, 2, 100) * scale, placed((100,)), [Memory(), Memory()]) / scale
        torch.testing.assert_close(out, exchange(of, noise(1, 2, 100), placed((100,)), [Memory(), Memory()]))


def test_zero_counts_as_positive_and_a_bucket_of_zeros_stays_zero() -> None:
    out = exchange(OneBit(), torch.tensor([[0.0, -4.0]]), placed((2,)), [Memory()])
    assert out.tolist() == [2.0, -2.0]
    assert not exchange(OneBit(), torch.zeros(2, 50), placed((50,)), [Memory(), Memory()]).any()


def test_switching_it_off_sends_the_residual_once_and_frees_it() -> None:
    sessions = run(experiment(3, 10, compressor=OneBit.usual()), Change(6, "compressor", "Dense"))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert all("residual" not in s.rank.memory.buffers for s in sessions)
    assert not torch.equal(weights(sessions[0]), weights(run(experiment(3, 10))[0]))


def test_nested_error_feedback_collapses_to_one() -> None:
    """So `compressor.of` may be set to a bare name, which brings its own error feedback."""
    e = experiment(2, 8, compressor=ErrorFeedback())
    within = run(e, Change(0, "compressor.of", "OneBit"))[0]
    assert within.experiment.compressor == ErrorFeedback(of=OneBit.usual())
    assert torch.equal(weights(within), weights(run(e, Change(0, "compressor", "OneBit"))[0]))
