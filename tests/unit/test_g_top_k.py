"""Tests gTop-k against a plain merge of entries with known origin, and the record."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, toy
from workbench.compressors import ErrorFeedback, GTopK
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Memory
from workbench.settings import Change

pytestmark = pytest.mark.ranks

Entries = dict[int, dict[int, float]]  # index -> each rank's part of the sum there


def whole(seed: int, ranks: int, n: int) -> torch.Tensor:
    """Returns integers, so that sums are exact in any order; hardly two have the same magnitude."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**18), 2**18, (ranks, n), generator=rng).float()


def kept(entries: Entries, k: int) -> Entries:
    best = sorted(entries, key=lambda i: (-abs(sum(entries[i].values())), i))[:k]
    return {i: entries[i] for i in best}


def merged(a: Entries, b: Entries, k: int) -> Entries:
    return kept({i: {**a.get(i, {}), **b.get(i, {})} for i in {*a, *b}}, k)


def plain(g: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (result, each rank's contribution) from lists of each rank's entries."""
    p = len(g)
    held = [kept({i: {r: float(v)} for i, v in enumerate(row)}, k) for r, row in enumerate(g)]
    q = max(2**b for b in range(8) if 2**b <= p)
    for r in range(q, p):
        held[r - q] = merged(held[r - q], held[r], k)
    bit = 1
    while bit < q:
        held[:q] = [merged(held[r], held[r ^ bit], k) for r in range(q)]
        bit *= 2
    given = torch.zeros_like(g)
    for i, parts in held[0].items():
        for r, value in parts.items():
            given[r, i] = value
    return given.sum(0), given


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_result_and_contributions_equal_a_plain_merge(ranks: int) -> None:
    for seed in range(6):
        g, memories = whole(seed, ranks, 60), [Memory() for _ in range(ranks)]
        out = exchange(ErrorFeedback(of=GTopK(density=0.1)), g, placed((60,)), memories)
        want, given = plain(g, 6)
        assert torch.equal(out.float(), want) and int((out != 0).sum()) <= 6
        left = torch.stack([m.buffers["residual"]["p0"] for m in memories])
        assert torch.equal(left, g - given)


def one_hot(*places: tuple[int, float]) -> torch.Tensor:
    """Gives each rank one entry: (ranks, 4)."""
    g = torch.zeros(len(places), 4)
    for r, (i, value) in enumerate(places):
        g[r, i] = value
    return g


@pytest.mark.parametrize(
    ("g", "result", "owing"),
    [
        (one_hot((0, 5.0), (1, 6.0), (0, 9.0), (2, 1.0)), (0, 9.0), [0, 1, 3]),
        (one_hot((1, 6.0), (0, 9.0), (0, 5.0)), (0, 9.0), [0, 2]),
        (one_hot((1, 6.0), (0, 7.0), (2, 1.0), (3, 2.0), (0, 5.0)), (0, 7.0), [0, 2, 3, 4]),
    ],
    ids=["dropped in the first round", "handed over and dropped", "handed over to a larger one"],
)
def test_dropped_values_return_to_the_residual_even_if_the_entry_comes_back(
    g: torch.Tensor, result: tuple[int, float], owing: list[int]
) -> None:
    memories = [Memory() for _ in g]
    out = exchange(ErrorFeedback(of=GTopK(density=0.25)), g, placed((4,)), memories)
    want = torch.zeros(4).double()
    want[result[0]] = result[1]
    assert torch.equal(out, want)
    for r, memory in enumerate(memories):
        left = memory.buffers["residual"]["p0"]
        assert torch.equal(left, g[r] if r in owing else torch.zeros(4)), r


def test_two_ranks_without_overlap_find_the_largest_of_the_sum() -> None:
    for seed in range(5):
        g = whole(seed, 2, 100)
        g[0, 50:] = g[1, :50] = 0.0
        total = g.sum(0)
        want = torch.zeros(100)
        best = total.abs().topk(10).indices
        want[best] = total[best]
        assert torch.equal(exchange(GTopK(density=0.1), g, placed((100,)), [Memory(), Memory()]).float(), want)


def test_density_one_gives_the_whole_sum() -> None:
    g = whole(3, 6, 40)
    assert torch.equal(exchange(GTopK(density=1.0), g, placed((40,)), [Memory() for _ in g]).float(), g.sum(0))


@pytest.mark.parametrize("ranks", [3, 5])
def test_many_steps_with_changing_densities_lose_nothing(ranks: int) -> None:
    memories, rng = [Memory() for _ in range(ranks)], torch.Generator().manual_seed(0)
    sent = owed = torch.zeros(200, dtype=torch.float64)
    for _ in range(80):
        density = float(torch.rand((), generator=rng)) ** 3 + 0.005
        g = torch.randn(ranks, 200, generator=rng)
        owed = owed + g.double().sum(0)
        sent = sent + exchange(ErrorFeedback(of=GTopK(density=min(1.0, density))), g, placed((200,)), memories)
    left = sum(m.buffers["residual"]["p0"].double() for m in memories)
    assert (sent + left - owed).norm() <= 1e-5 * owed.norm()


def formula(session: object, p: int, density: float) -> int:
    """Returns the bytes that a rank sends per step, from sizes alone."""
    total, me = 0, session.rank.index
    for bucket in session.layout.buckets:
        k = max(1, round(density * bucket.data.numel()))
        q = max(2**b for b in range(8) if 2**b <= p)
        if me >= q:
            total += 8 * k
        else:
            total += 8 * k * (q.bit_length() - 1) + (8 * k + -(-k // 8)) * (me < p - q)
    return total


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_every_rank_sends_the_formulas_bytes_before_and_after_a_live_change(ranks: int) -> None:
    for s in run(experiment(ranks, 7, compressor=GTopK.usual()), Change(4, "density", 0.2)):
        for step, density in ((2, 0.01), (3, 0.01), (4, 0.2), (6, 0.2)):
            assert sum(n for at, _, n in s.record.comm() if at == step) == formula(s, ranks, density)


@pytest.mark.parametrize("ranks", [3, 6])
def test_ranks_agree_through_live_changes(ranks: int) -> None:
    changes = [Change(3, "density", 0.5), Change(5, "bucket_mb", 0.05), Change(7, "compressor", "Dense")]
    sessions = run(experiment(ranks, 10, compressor=GTopK.usual()), *changes)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert all("residual" not in s.rank.memory.buffers for s in sessions)


def test_g_top_k_reaches_the_loss_of_plain_averaging() -> None:
    rest = {"task": toy(partial(torch.optim.SGD, lr=0.05)), "eval_every": 150}
    ends = {}
    for c in ({}, {"compressor": ErrorFeedback(of=GTopK(density=0.1))}):
        session = run(experiment(3, 151, **c, **rest))[0]
        held = [v for _, name, _, v in session.record.samples if name == "held_out"]
        ends[str(c)] = held[-1]
        assert held[-1] < 0.7 * held[0]
    assert max(ends.values()) < 1.2 * min(ends.values()), ends
