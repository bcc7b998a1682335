"""Tests RandomK's statistics: equally likely sets, no bias, the stated variance, the same on all ranks."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from tests.ranks import exchange, experiment, placed, run
from workbench.compressors import Dense, ErrorFeedback, RandomK
from workbench.compressors.random_k import seeded, subset
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Op, Rank
from workbench.settings import Change, KnobError

pytestmark = pytest.mark.ranks


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def once(compressor: RandomK, x: torch.Tensor, memory: Memory) -> torch.Tensor:
    """Returns C(x) of one rank: (n,) float64."""
    return exchange(compressor, x[None], placed((x.numel(),)), [memory])


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 10), (10, 3), (1000, 1), (1000, 240), (1000, 260), (10**6, 10**4)])
def test_k_different_places_are_drawn(n: int, k: int) -> None:
    for seed in range(5):
        places = subset(n, k, torch.Generator().manual_seed(seed))
        assert places.unique().shape == places.shape == (k,)
        assert 0 <= int(places.min()) and int(places.max()) < n


@pytest.mark.parametrize(("n", "k"), [(9, 2), (6, 3)])
def test_every_set_of_places_is_equally_likely(n: int, k: int) -> None:
    """Pearson's statistic over all sets is chi-squared: its mean is its degrees of freedom, its variance twice that."""
    draws, rng = 8000, torch.Generator().manual_seed(1)
    counts = dict.fromkeys(combinations(range(n), k), 0)
    for _ in range(draws):
        counts[tuple(sorted(subset(n, k, rng).tolist()))] += 1
    want, freedom = draws / len(counts), len(counts) - 1
    pearson = sum((c - want) ** 2 / want for c in counts.values())
    assert abs(pearson - freedom) < 5 * (2 * freedom) ** 0.5


def test_all_ranks_draw_the_same_places_which_differ_by_step_and_bucket() -> None:
    parts, memories, seen = placed((300,), (300,)), [Memory(1), Memory(2)], []
    for _ in range(3):
        for group in ([parts[0]], [parts[1]]):
            out = exchange(RandomK(density=0.1), torch.ones(2, 600), group, memories)
            assert sorted(set(out.tolist())) == [0.0, 2.0] and int((out == 2).sum()) == 30
            seen.append(tuple(out.nonzero().flatten().tolist()))
    assert len(set(seen)) == 6


def test_torchs_own_random_numbers_stay_unchanged() -> None:
    before = torch.get_rng_state()
    once(RandomK(), noise(1, 5000), Memory())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_with_scaling_it_is_unbiased(density: float, seed: int) -> None:
    """U = T ||mean - x||^2 / mean ||C(x) - x||^2 is 1 on average, with a spread of sqrt(2 / degrees of freedom)."""
    x, draws, memory = noise(seed, 300) ** 3, 1000, Memory()
    off = torch.stack([once(RandomK(density=density, scaled=True), x, memory) - x for _ in range(draws)])
    spread = off.square().mean(0)
    u = draws * off.mean(0).square().sum() / spread.sum()
    freedom = spread.sum() ** 2 / spread.square().sum()
    assert abs(u - 1) < 5 * (2 / freedom) ** 0.5 + 5 / draws**0.5


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
def test_with_scaling_its_variance_is_n_over_k_minus_1_times_the_squared_norm(density: float) -> None:
    """The mean over the draws is within five of its own standard errors."""
    x, draws, memory = noise(3, 1000), 600, Memory()
    codec = RandomK(density=density, scaled=True)
    off = torch.stack([(once(codec, x, memory) - x).square().sum() for _ in range(draws)])
    want = (1 / density - 1) * float(x.double().square().sum())
    assert abs(float(off.mean()) - want) <= 5 * float(off.std()) / draws**0.5 + 1e-6 * want


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
def test_without_scaling_its_mean_error_is_1_minus_k_over_n_of_the_squared_norm(density: float) -> None:
    x, draws, memory = noise(4, 1000), 600, Memory()
    left = torch.stack([(once(RandomK(density=density), x, memory) - x).square().sum() for _ in range(draws)])
    want = (1 - density) * float(x.double().square().sum())
    assert abs(float(left.mean()) - want) <= 5 * float(left.std()) / draws**0.5


@pytest.mark.parametrize("scaled", [False, True])
def test_it_equals_the_plain_rule_on_the_sum(scaled: bool) -> None:
    g, parts = noise(5, 3, 500), placed((500,))
    memories = [Memory() for _ in range(3)]
    for count in range(4):
        out = exchange(RandomK(density=0.1, scaled=scaled), g, parts, memories)
        want, places = torch.zeros(500), subset(500, 50, seeded("p0", count))
        want[places] = g.sum(0)[places] * (10 if scaled else 1)
        torch.testing.assert_close(out.float(), want)


def test_only_values_are_sent_as_many_for_any_number_of_ranks() -> None:
    for ranks in (2, 4):
        session = run(experiment(ranks, 8, compressor=RandomK()), Change(5, "density", 0.2))[0]
        for step, density in ((3, 0.01), (4, 0.01), (5, 0.2), (7, 0.2)):
            sizes = [max(1, round(density * b.data.numel())) for b in session.layout.buckets]
            want = sum(traffic("all_reduce", 4 * k, ranks)[0] for k in sizes)
            assert sum(n for s, _, n in session.record.comm() if s == step) == want


def test_ranks_agree_through_changes_of_buckets_ratio_and_compressor() -> None:
    changes = [
        Change(3, "bucket_mb", 0.02),
        Change(5, "density", 0.3),
        Change(7, "compressor", "TopK"),
        Change(9, "compressor", "RandomK"),
        Change(11, "bucket_mb", 0.01),
        Change(13, "compressor", "Dense"),
    ]
    sessions = run(experiment(3, 16, compressor=RandomK.usual()), *changes)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    counts = [s.rank.memory.parts[RandomK.buffer] for s in sessions]
    assert counts[0] == counts[1] == counts[2] and set(counts[0].values()) != {0}


def test_density_1_equals_plain_averaging() -> None:
    whole, dense = (run(experiment(2, 6, compressor=c))[0] for c in (RandomK(density=1.0), Dense()))
    assert hash_model_state(whole.layout) == hash_model_state(dense.layout)


def test_under_error_feedback_every_entry_is_sent_in_the_end() -> None:
    memory, x = [Memory()], noise(6, 200)
    total = torch.zeros(200, dtype=torch.float64)
    for step in range(200):
        total += exchange(
            RandomK.usual() if step else ErrorFeedback(of=RandomK(density=0.05)),
            x[None] * (step == 0),
            placed((200,)),
            memory,
        )
    chance = (1 - 0.01) ** 199  # that an entry is never drawn
    assert float((total == x.double()).float().mean()) > 1 - chance - 5 * (chance / 200) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_sent_in_16_bits(dtype: torch.dtype) -> None:
    bucket = Bucket(0, noise(7, 400).to(dtype), tuple(placed((400,))), 0)
    child = RandomK(density=0.1).reduce(Rank(0, 2), bucket, Memory())
    op: Op = child.send(None)
    assert op.verb == "all_reduce" and op.args[0].dtype == dtype and op.args[0].shape == (40,)


@pytest.mark.parametrize("value", [0, 1.5, "many"])
def test_an_impossible_density_is_refused_with_the_range(value: object) -> None:
    with pytest.raises(KnobError, match=r"compressor.of.density=.*\[0.0001, 1\]"):
        experiment(compressor=RandomK.usual()).set("density", value)


def test_scaling_under_error_feedback_is_refused_with_an_alternative() -> None:
    with pytest.raises(
        KnobError, match=r"scaled=True: under error feedback .* use scaled=False with error feedback, or .*out"
    ):
        experiment(compressor=RandomK.usual()).set("scaled", True)
    assert experiment(compressor=RandomK()).set("scaled", True).compressor == RandomK(scaled=True)
