"""Compares ScaleCom with the paper's algorithm in numpy, and with the record."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, toy, weights
from workbench.compressors import Compressor, ErrorFeedback, ScaleCom, TopK
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Memory
from workbench.settings import Change

pytestmark = pytest.mark.ranks

PARTS = placed((20, 10))


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(steps: list[np.ndarray], k: int, beta: float) -> tuple[list[np.ndarray], np.ndarray]:
    """Runs the paper's algorithm; returns each step's output and every rank's final memory."""
    memory, out = np.zeros_like(steps[0]), []
    for t, g in enumerate(steps):
        x = memory + g
        support = np.argsort(-np.abs(x[t % len(x)]))[:k]
        sent = np.zeros_like(x)
        sent[:, support] = x[:, support]
        out.append(sent.sum(0))
        memory = (1 - beta) * memory + beta * (x - sent)
    return out, memory


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_scale_com_equals_the_papers_algorithm(ranks: int, beta: float) -> None:
    steps = [noise(t, ranks, 200) for t in range(3 * ranks + 2)]
    memories = [Memory() for _ in range(ranks)]
    got = [exchange(ScaleCom(density=0.05, beta=beta), g, PARTS, memories) for g in steps]
    want, left = plain([g.numpy() for g in steps], 10, beta)
    np.testing.assert_allclose(torch.stack(got).numpy(), want, rtol=1e-12, atol=1e-12)
    held = torch.stack([m.buffers["residual"]["p0"] for m in memories]).numpy()
    np.testing.assert_allclose(held, left, rtol=1e-12, atol=1e-12)


def test_all_ranks_send_the_places_of_the_leaders_largest_entries() -> None:
    memories, g = [Memory() for _ in range(3)], torch.zeros(3, 200)
    for r in range(3):
        g[r, 10 * r : 10 * r + 10] = 5.0  # each rank has other largest entries
    g += 0.1
    for t in range(7):
        found = exchange(ScaleCom(density=0.05), g, PARTS, memories).nonzero().flatten().tolist()
        assert found == list(range(10 * (t % 3), 10 * (t % 3) + 10))


@pytest.mark.parametrize("ranks", [1, 3])
def test_error_feedback_around_it_changes_nothing(ranks: int) -> None:
    mine, wrapped = [Memory() for _ in range(ranks)], [Memory() for _ in range(ranks)]
    for t in range(5):
        g = noise(t, ranks, 200)
        a = exchange(ScaleCom(beta=0.5), g, PARTS, mine)
        assert torch.equal(a, exchange(ErrorFeedback(of=ScaleCom(beta=0.5)), g, PARTS, wrapped))


def test_one_rank_without_a_filter_equals_top_k_under_error_feedback() -> None:
    mine, other = [Memory()], [Memory()]
    for t in range(6):
        g = noise(t, 1, 200)
        want = exchange(ErrorFeedback(of=TopK(density=0.05)), g, PARTS, other)
        assert torch.equal(exchange(ScaleCom(density=0.05), g, PARTS, mine), want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_outside_the_leaders_choice_are_dropped(bad: float) -> None:
    memories, g = [Memory(), Memory()], noise(1, 2, 200)
    g[0, :10] = 50.0
    g[1, 77] = bad
    assert bool(exchange(ScaleCom(density=0.05), g, PARTS, memories).isfinite().all())
    assert memories[1].buffers["residual"]["p0"][77] == 0
    g[1, 77] = 1.0
    for _ in range(3):
        assert bool(exchange(ScaleCom(density=0.05), g, PARTS, memories).isfinite().all())


def formula(session: object, density: float) -> int:
    """Returns the bytes that one of four ranks sends per step."""
    total = 0
    for bucket in session.layout.buckets:
        k = max(1, round(density * bucket.data.numel()))
        total += traffic("broadcast", 4 * k, 4)[0] + traffic("all_reduce", 4 * k, 4)[0]
    return total


def test_recorded_bytes_equal_the_formula_before_and_after_live_changes() -> None:
    changes = [Change(4, "density", 0.3), Change(6, "bucket_mb", 0.05)]
    session = run(experiment(4, 9, compressor=ScaleCom(density=0.02)), *changes)[0]
    sent = [sum(n for k, _, n in session.record.comm() if k == step) for step in range(9)]
    plain_run = run(experiment(4, 4))[0]
    assert sent[2] == sent[3] == formula(plain_run, 0.02) and sent[5] == formula(plain_run, 0.3)
    assert sent[8] == formula(session, 0.3)


def test_the_leader_rotates_through_a_change_of_buckets_and_ranks_agree() -> None:
    e = experiment(3, 12, compressor=ScaleCom(density=0.05))
    sessions = run(e, Change(5, "bucket_mb", 0.05), Change(8, "beta", 0.1), Change(10, "bucket_mb", 0.01))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    turns = [s.rank.memory.parts["scale_com"] for s in sessions]
    assert turns[0] == turns[1] == turns[2] and set(turns[0].values()) == {12}


@pytest.mark.parametrize("other", [TopK.usual(), ErrorFeedback(of=TopK(density=0.2))], ids=str)
def test_the_residual_passes_between_it_and_error_feedback(other: Compressor) -> None:
    there = run(experiment(2, 10, compressor=ScaleCom()), Change(5, "compressor", {"ErrorFeedback": {"of": "TopK"}}))
    back = run(experiment(2, 10, compressor=other), Change(5, "compressor", "ScaleCom"))
    for s in (*there, *back):
        assert "residual" in s.rank.memory.buffers and not s.training.flushing
        dense = sum(n for step, _, n in s.record.comm() if step == 5)
        assert dense < sum(b.nbytes for b in s.layout.buckets), "nothing was flushed"


def test_switching_it_off_sends_the_residual_once_and_frees_it() -> None:
    sessions = run(experiment(3, 10, compressor=ScaleCom()), Change(6, "compressor", "Dense"))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert all("residual" not in s.rank.memory.buffers for s in sessions)
    assert not torch.equal(weights(sessions[0]), weights(run(experiment(3, 10))[0]))


def test_it_trains_as_far_as_plain_averaging() -> None:
    rest = {"task": toy(partial(torch.optim.SGD, lr=0.05)), "eval_every": 150}
    ends = {}
    for c in ({}, {"compressor": ScaleCom(density=0.1)}, {"compressor": ScaleCom(density=0.1, beta=0.5)}):
        session = run(experiment(2, 151, **c, **rest))[0]
        held = [v for _, name, _, v in session.record.samples if name == "held_out"]
        ends[str(c)] = held[-1]
        assert held[-1] < 0.7 * held[0]
    assert max(ends.values()) < 1.2 * min(ends.values()), ends
