"""Tests the choice of the largest entries of a long vector through a sample: against sorting, and its error."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ranks import exchange, placed
from workbench.compressors import SampledTopK, TopK
from workbench.compressors._select import BLOCK_ELEMENTS, above, largest, roughly, threshold_of, unset
from workbench.rank import Bucket, Memory

pytestmark = pytest.mark.ranks


def noise(seed: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def heavy(seed: int, n: int) -> torch.Tensor:
    """Returns Student's t with two degrees of freedom: a tail so long that it has no variance."""
    rng = torch.Generator().manual_seed(seed)
    energy = -2 * torch.rand(n, generator=rng).clamp_(min=1e-12).log_()
    return torch.randn(n, generator=rng) / (energy / 2).sqrt()


def sparse(seed: int, n: int) -> torch.Tensor:
    """Returns a vector with 2 % nonzero entries."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=rng) * (torch.rand(n, generator=rng) < 0.02)


SHAPES = {"normal": noise, "heavy-tailed": heavy, "sparse": sparse}
shapes = pytest.mark.parametrize("shape", SHAPES)


def energy(x: torch.Tensor, index: torch.Tensor) -> float:
    return float(x[index].double().square().sum())


@shapes
@pytest.mark.parametrize("n", [100, 20_000, 300_001, 2**20 + 5])
@pytest.mark.parametrize("density", [0.0003, 0.01, 0.2, 0.7])
def test_the_largest_entries_equal_those_of_a_sort(shape: str, n: int, density: float) -> None:
    x, k = SHAPES[shape](n, n), max(1, round(density * n))
    found = largest(x, k)
    assert found.shape == found.unique().shape == (k,)
    want = x.abs().topk(k).values
    torch.testing.assert_close(x[found].abs().sort(descending=True).values, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_ties_and_other_dtypes_give_k_entries(dtype: torch.dtype) -> None:
    x, k = (3 * noise(1, 400_000)).round().to(dtype), 4000  # about seven different magnitudes
    for y in (x, noise(2, 400_000).to(dtype), torch.ones(400_000, dtype=dtype), torch.zeros(400_000, dtype=dtype)):
        found = largest(y, k)
        assert found.unique().shape == (k,)
        assert y[found].abs().double().sum() == y.abs().topk(k).values.double().sum()


def test_nan_and_infinity_are_among_the_largest() -> None:
    x = noise(3, 400_000)
    x[[5, 77_777, 399_999]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for found in (largest(x, 4000), roughly(x, 4000), above(x, 3.0)):
        assert {5, 77_777, 399_999} <= set(found.tolist())
    x[:] = float("nan")
    assert largest(x, 4000).unique().shape == (4000,)


@pytest.mark.parametrize(
    "n", [0, 1, 7, 1000, 2 * BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 1, 3 * BLOCK_ELEMENTS - 3, 600_001]
)
@pytest.mark.parametrize("threshold", [0.0, 0.5, 3.0, 100.0])
def test_entries_that_reach_a_threshold_are_found_in_order(n: int, threshold: float) -> None:
    whole = noise(n, n + 3)
    for x in (whole[:n], whole[3:]):  # the second begins at an unaligned address
        want = (x.abs() >= threshold).nonzero().flatten()
        assert torch.equal(above(x, threshold), want)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_unset_flags_are_found(share: float) -> None:
    for n in (3, BLOCK_ELEMENTS - 1, 4 * BLOCK_ELEMENTS + 5):
        flags = torch.rand(n, generator=torch.Generator().manual_seed(n)) >= share
        assert torch.equal(unset(flags), (~flags).nonzero().flatten())


@shapes
@pytest.mark.parametrize(("n", "density"), [(2**20, 0.01), (2**20, 0.001), (2**18, 0.01), (2**18, 0.1), (1000, 0.01)])
def test_a_sampled_choice_is_near_its_k_and_keeps_the_energy(shape: str, n: int, density: float) -> None:
    k = round(density * n)
    for seed in range(4):
        x = SHAPES[shape](seed, n)
        found = roughly(x, k, torch.Generator().manual_seed(seed))
        assert found.unique().shape == found.shape
        assert min(0.98 * k, x.count_nonzero()) <= found.numel() <= 1.2 * k
        assert energy(x, found) >= 0.98 * energy(x, x.abs().topk(k).indices)
        left = x.abs().scatter(0, found, 0.0).max()
        assert left <= x[found].abs().min(), "nothing that was left out is larger than what was found"


def test_a_sampled_choice_differs_from_k_and_from_draw_to_draw() -> None:
    """So the test above does not pass only because everything is sorted."""
    x, k = noise(5, 2**21), 2**21 // 100
    counts = {roughly(x, k, torch.Generator().manual_seed(seed)).numel() for seed in range(6)}
    assert len(counts - {k}) > 2


@pytest.mark.parametrize("shape", ["normal", "heavy-tailed"])
@pytest.mark.parametrize("spare", [0.0, 4.0])
def test_a_sampled_threshold_lets_about_k_pass_within_its_stated_spread(shape: str, spare: float) -> None:
    """The share above the r-th largest of m has mean r / (m + 1) and a relative spread of 1 / sqrt(r) at most."""
    n, k, draws = 2**18, 2621, 60
    m = math.ceil(64 * n / k)
    r = math.ceil(k * m / n + spare * math.sqrt(k * m / n))
    x = SHAPES[shape](1, n)
    counts = [
        float((x.abs() >= threshold_of(x, k, spare=spare, generator=torch.Generator().manual_seed(s))).sum())
        for s in range(draws)
    ]
    mean, want = sum(counts) / draws, n * r / (m + 1)
    assert abs(mean - want) < 5 * want / math.sqrt(r * draws)
    assert max(abs(c - want) for c in counts) < 5 * want / math.sqrt(r)
    if spare:
        assert min(counts) >= k


def test_a_sample_is_not_aligned_with_the_rows_of_a_matrix() -> None:
    """One column of a hundred has all large entries: a sample of every hundredth entry sees all of them or none."""
    x = 0.01 * noise(1, 400_000).view(-1, 100)
    x[:, 37] += 5.0
    found = roughly(x.reshape(-1), 4000, torch.Generator().manual_seed(0))
    assert 3920 <= found.numel() <= 4800 and int((found % 100 == 37).sum()) >= 3920


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
def test_top_k_of_a_long_bucket_equals_a_sort(density: float) -> None:
    g = torch.stack([noise(1, 300_000), heavy(2, 300_000)])
    out = exchange(TopK(density=density), g, placed((3000, 100)), [Memory(), Memory()])
    want = torch.zeros(300_000, dtype=torch.float64)
    for x in g:
        index = x.abs().topk(round(density * 300_000)).indices
        want[index] += x[index].double()
    torch.testing.assert_close(out, want)


def test_sampled_top_k_draws_new_samples_without_torchs_random_numbers() -> None:
    x, memory = noise(4, 2**21), Memory(3)
    before = torch.get_rng_state()
    bucket = Bucket(0, x, tuple(placed((2**21,))), 0)
    chosen = [SampledTopK().choose(x, memory, bucket)[0].numel() for _ in range(4)]
    assert len(set(chosen)) > 1 and all(0.98 <= c / (2**21 / 100) <= 1.2 for c in chosen)
    assert torch.equal(torch.get_rng_state(), before)


def test_sampled_top_k_sends_no_zeros() -> None:
    x = torch.zeros(2**16)
    x[[3, 5000, 65_535]] = torch.tensor([1.0, -2.0, 1e-30])
    index, values = SampledTopK().choose(x, Memory(), Bucket(0, x, tuple(placed((2**16,))), 0))
    assert sorted(index.tolist()) == [3, 5000, 65_535] and torch.equal(values, x[index])


def test_a_sort_finds_the_missing_entries_if_the_sampled_threshold_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens once in ten thousand samples, so the test sets the threshold too high."""
    x, k = noise(4, 100_000), 1000
    highest = float(x.abs().topk(k // 2).values[-1])
    monkeypatch.setattr("workbench.compressors._select.threshold_of", lambda *_, **__: highest)
    found = largest(x, k)
    assert found.unique().shape == (k,)
    assert float(x[found].abs().min()) == float(x.abs().topk(k).values[-1])
