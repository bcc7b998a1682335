"""Compares Ok-Topk with the exact algorithm in numpy, and its volume with the paper's bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, together, toy
from workbench.compressors import ErrorFeedback, OkTopK
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Op, Rank
from workbench.settings import Change

pytestmark = pytest.mark.ranks

Gradients = Callable[[int], torch.Tensor]


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def top(x: np.ndarray, k: int) -> np.ndarray:
    """Keeps the k largest magnitudes of x, sets other elements to 0."""
    return np.where(np.abs(x) >= np.sort(np.abs(x))[-k], x, 0.0)


def plain(steps: list[np.ndarray], k: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Runs the exact algorithm: the top-k of the sum of all top-k; returns outputs and residuals."""
    left, out = np.zeros_like(steps[0]), []
    for g in steps:
        x = left + g
        chosen = np.stack([top(row, k) for row in x])
        out.append(top(chosen.sum(0), k))
        left = x - np.where(out[-1] != 0, chosen, 0.0)
    return out, left


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "in a corner"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_with_exact_thresholds_in_every_step_it_equals_the_exact_algorithm(ranks: int, skewed: bool) -> None:
    steps = [noise(t, ranks, 400).double() for t in range(7)]
    if skewed:
        for g in steps:
            g[:, 40:] *= 0.01
    memories = [Memory() for _ in range(ranks)]
    of = ErrorFeedback(of=OkTopK(density=0.05, threshold_every=1, region_every=3))
    got = [exchange(of, g, placed((400,)), memories) for g in steps]
    want, left = plain([g.numpy() for g in steps], 20)
    np.testing.assert_allclose(torch.stack(got).numpy(), want, rtol=1e-12, atol=1e-12)
    held = torch.stack([m.buffers["residual"]["p0"] for m in memories]).numpy()
    np.testing.assert_allclose(held, left, rtol=1e-12, atol=1e-12)


def exchanged(of: Any, g: torch.Tensor, memories: list[Memory]) -> tuple[torch.Tensor, list[Op], list[int]]:
    """Exchanges (ranks, n) once; returns the result, the operations and each rank's bytes."""
    p, n = g.shape
    buckets = [Bucket(0, row.clone(), tuple(placed((n,))), 0) for row in g]
    seen: list[Op] = []
    ranks = [Rank(r, p) for r in range(p)]
    together([of.reduce(k, b, m) for k, b, m in zip(ranks, buckets, memories, strict=True)], seen)
    sent = [0] * p
    for op in seen:
        if op.verb == "all_to_allv":
            width = op.args[0][0].element_size()
            own = [width * (sum(row) - row[i]) for i, row in enumerate(op.args[1])]
        elif op.verb == "sample":
            own = [0] * p
        else:
            own = [traffic(op.verb, op.args[0].numel() * op.args[0].element_size(), p)[0]] * p
        sent = [a + b for a, b in zip(sent, own, strict=True)]
    return buckets[0].data, seen, sent


SHAPES: dict[str, Gradients] = {
    "normal": lambda p: noise(p, p, 10_000),
    "heavy tails": lambda p: noise(p, p, 10_000) ** 3,
    "in a corner": lambda p: noise(p, p, 10_000) * torch.linspace(1, 0.01, 10_000) ** 4,
    "alike on all ranks": lambda p: noise(p, 10_000) + 0.3 * noise(p + 1, p, 10_000),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_rank_sends_six_k_numbers_whatever_the_number_of_ranks(ranks: int, shape: str) -> None:
    """Counts lengths after residuals have grown: in every step with known thresholds, and on average over all."""
    n, k = 10_000, 600
    memories, base = [Memory() for _ in range(ranks)], SHAPES[shape](ranks)
    of, each = ErrorFeedback(of=OkTopK(density=k / n)), []
    for t in range(64):
        flip = torch.randn(ranks, n, generator=torch.Generator().manual_seed(t)).sign()
        out, _, sent = exchanged(of, base * flip, memories)
        each.append(max(sent) / 4 / k)
        assert k / 2 <= int((out != 0).sum()) <= 2 * k
    exact, *known = each[32:]
    assert max(known) < 6 and (exact + sum(known)) / 32 < 6, each
    assert min(known) > 2 * (ranks - 1) / ranks, "less than the pairs alone take"
    assert exact < 2.5 * ranks, "what is gathered where the common threshold is found is 2 k numbers of each other"


def test_regions_balance_the_sums_where_equal_regions_would_not() -> None:
    g = noise(1, 4, 8000) * torch.linspace(1, 0, 8000) ** 8
    _, seen, _ = exchanged(OkTopK(density=0.05), g, [Memory() for _ in range(4)])
    lengths = next(op.args[1] for op in seen if op.verb == "all_to_allv")
    owned = np.array(lengths).sum(0)
    assert owned.max() < 1.15 * owned.mean()
    equal = torch.stack([row.abs() for row in g]).topk(400).indices.flatten() // 2000
    assert equal.bincount(minlength=4).max() > 2 * 400


def test_selected_elements_are_gathered_in_equal_shares_even_if_one_rank_owns_them() -> None:
    """Seven of eight of the common largest elements are in the last region."""
    memories, g = [Memory() for _ in range(4)], noise(1, 4, 8000)
    of = OkTopK(density=0.05)
    exchanged(of, g, memories)
    g[:, 7000:] += 2.0 * g[:, 7000:].sign() * (noise(2, 1000) > 0)
    _, seen, sent = exchanged(of, g, memories)
    last = [op.args[1] for op in seen if op.verb == "all_to_allv"][-1]
    shares = [row[0] for row in last]
    assert max(shares) - min(shares) <= 8, "one pair"
    assert max(sent) < 6 * 4 * 400


@pytest.mark.parametrize("growth", [1.02, 0.98])
def test_a_threshold_follows_magnitudes_that_change_slowly(growth: float) -> None:
    memories, counts = [Memory() for _ in range(2)], []
    for t in range(40):
        out, _, _ = exchanged(OkTopK(density=0.05, threshold_every=1000), noise(t, 2, 8000) * growth**t, memories)
        counts.append(int((out != 0).sum()))
    assert all(200 <= c <= 800 for c in counts) and len(set(counts)) > 5, counts


@pytest.mark.parametrize("factor", [0.0, 1e-3, 1e3])
def test_after_a_sudden_change_of_magnitudes_neither_all_nor_no_elements_are_sent(factor: float) -> None:
    memories = [Memory() for _ in range(2)]
    for t, scale in enumerate([factor, 1.0, factor, 1.0]):
        out, _, sent = exchanged(OkTopK(density=0.05), noise(t, 2, 8000) * scale, memories)
        assert max(sent) < 6 * 4 * 400 + 500
        assert (200 <= int((out != 0).sum()) <= 800) == bool(scale)


def test_far_too_many_of_one_magnitude_are_cut_to_k() -> None:
    out, _, sent = exchanged(OkTopK(density=0.01), torch.ones(3, 5000), [Memory() for _ in range(3)])
    assert int((out != 0).sum()) == 50 and set(out.tolist()) == {0.0, 3.0}
    assert max(sent) < 6 * 4 * 50 + 500


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_pass_on_and_leave_thresholds_unchanged(bad: float) -> None:
    memories, of = [Memory() for _ in range(2)], ErrorFeedback(of=OkTopK(density=0.05))
    spoilt = noise(0, 2, 2000)
    spoilt[1, 7] = bad
    out, _, _ = exchanged(of, spoilt, memories)
    assert not out[7].isfinite() and int(out.isfinite().sum()) == 1999
    for t in range(1, 4):
        out, _, _ = exchanged(of, noise(t, 2, 2000), memories)
        assert bool(out.isfinite().all()) and 50 <= int((out != 0).sum()) <= 200


def test_a_live_density_acts_at_once() -> None:
    memories = [Memory() for _ in range(3)]
    for t, density in enumerate([0.01, 0.01, 0.1, 0.1, 0.002]):
        out, _, _ = exchanged(OkTopK(density=density), noise(t, 3, 10_000), memories)
        assert 0.5 <= int((out != 0).sum()) / (density * 10_000) <= 2


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ranks_agree_through_live_changes(ranks: int) -> None:
    changes = [
        Change(3, "density", 0.3), Change(5, "bucket_mb", 0.05), Change(6, "threshold_every", 2),
        Change(7, "region_every", 1), Change(11, "compressor", "Dense"),
    ]  # fmt: skip
    sessions = run(experiment(ranks, 14, compressor=OkTopK.usual()), *changes)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert all("residual" not in s.rank.memory.buffers for s in sessions)


def test_density_1_gives_the_whole_sum() -> None:
    g = noise(3, 3, 100)
    out, _, _ = exchanged(OkTopK(density=1.0), g, [Memory() for _ in g])
    torch.testing.assert_close(out, g.sum(0))


def test_it_trains_as_far_as_plain_averaging() -> None:
    rest = {"task": toy(partial(torch.optim.SGD, lr=0.05)), "eval_every": 150}
    ends = {}
    for c in ({}, {"compressor": ErrorFeedback(of=OkTopK(density=0.1))}):
        session = run(experiment(3, 151, **c, **rest))[0]
        held = [v for _, name, _, v in session.record.samples if name == "held_out"]
        ends[str(c)] = held[-1]
        assert held[-1] < 0.7 * held[0]
    assert max(ends.values()) < 1.2 * min(ends.values()), ends
