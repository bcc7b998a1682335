"""Tests random rounding: right on average, independent between elements, and within its byte."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.compressors._stochastic import BLOCK, dithered, plain
from workbench.rank import Memory


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ways(x: torch.Tensor, seed: int, **rest: float) -> list[torch.Tensor]:
    """Returns codes by blocks, as on the CPU, and by the plain expression, as on other devices."""
    return [dithered(x, rng(seed), **rest), plain(x, rng(seed), rest.get("scale", 1.0), int(rest.get("top", 255)))]


@pytest.mark.parametrize("top", [1, 7, 15, 127, 255])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_mean_of_rounded_values_is_the_input(seed: int, top: int) -> None:
    """U = T ||mean - x||^2 / mean ||Q - x||^2 is 1 on average, with a spread of sqrt(2 / degrees of freedom)."""
    draws, own = 500, rng(seed)
    x = noise(seed, 2000).abs() ** 3
    x = x / x.max() * top
    off = torch.stack([dithered(x, own, top=top) - x for _ in range(draws)]).double()
    spread = off.square().mean(0)
    u = draws * off.mean(0).square().sum() / spread.sum()
    freedom = spread.sum() ** 2 / spread.square().sum()
    assert abs(u - 1) < 5 * (2 / freedom) ** 0.5 + 5 / draws**0.5, (float(u), float(freedom))
    share = x - x.floor()
    torch.testing.assert_close(spread.sum(), (share * (1 - share)).double().sum(), rtol=0.02, atol=0)


@pytest.mark.parametrize("log", [1, 4, 8, 12, 16, 18])
def test_small_fractions_round_up_with_the_right_frequency(log: int) -> None:
    n, share = 2**23, 2.0**-log
    for base in (0.0, 3.0):
        up = float((dithered(torch.full((n,), base + share), rng(log)) - base).sum())
        assert abs(up - n * share) < 5 * math.sqrt(n * share * (1 - share)), "five standard deviations"


@pytest.mark.parametrize("share", [0.5, 0.03])
def test_neighbours_blocks_and_calls_are_independent(share: float) -> None:
    n, own = 40 * BLOCK, rng(3)
    first, second = (dithered(torch.full((n,), share), own).double() - share for _ in range(2))
    spread = share * (1 - share)
    for lag in (1, 2, 3, 4, 7, 8, 16, 63, 64, 1024, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 16 * BLOCK):
        met = float((first[:-lag] * first[lag:]).mean()) / spread
        assert abs(met) < 5 / math.sqrt(n - lag), lag
    assert abs(float((first * second).mean())) / spread < 5 / math.sqrt(n)


def test_sums_over_any_stretch_have_the_variance_of_independent_draws() -> None:
    x = torch.full((64 * BLOCK,), 0.25)
    codes = dithered(x, rng(8)).double() - 0.25
    for length in (16, 256, 4096, BLOCK):
        sums = codes.view(-1, length).sum(1)
        ratio = float(sums.square().mean()) / (length * 0.25 * 0.75)
        assert abs(ratio - 1) < 5 * math.sqrt(2 / len(sums)), length
    across = codes.view(64, BLOCK).sum(0)  # the same place of every block
    assert abs(float(across.square().mean()) / (64 * 0.25 * 0.75) - 1) < 5 * math.sqrt(2 / BLOCK)


def test_whole_numbers_stay_unchanged() -> None:
    x = torch.arange(256.0).repeat(4000)
    for codes in ways(x, 1):
        assert torch.equal(codes.float(), x)
    assert torch.equal(dithered(torch.arange(256.0) / 4, rng(0), scale=4.0).float(), torch.arange(256.0))


def test_the_plain_sum_overflows_its_byte_at_the_top() -> None:
    """This is the failure to avoid: the largest random number below 1, added in float32."""
    assert float((torch.tensor(255.0) + (1 - 2.0**-24)).floor()) == 256


@pytest.mark.parametrize("top", [1, 200, 255])
def test_values_beyond_the_range_are_clamped(top: int) -> None:
    over = torch.tensor([-1e-6, -3.0, 0.0, top + 1e-5, top * (1 + 2e-7), min(top + 40.0, 255.4)]).repeat(1000)
    for codes in ways(over, 2, top=top):
        assert codes.view(1000, 6)[0].tolist() == [0, 0, 0, top, top, top] and codes.max() == top
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1e30])
    for codes in ways(odd, 2, top=top):
        assert codes.dtype == torch.uint8 and codes.max() <= top


def test_the_generator_determines_the_codes() -> None:
    x = noise(1, 100_000).abs()
    own, before = rng(5), torch.get_rng_state()
    first = dithered(x, own)
    assert torch.equal(first, dithered(x, rng(5)))
    assert not torch.equal(first, dithered(x, own)), "a second call goes on"
    assert not torch.equal(first, dithered(x, rng(6)))
    assert torch.equal(before, torch.get_rng_state()), "torch's own numbers are nobody's business"


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_every_element_gets_its_code_for_any_number_of_elements(n: int) -> None:
    x = torch.arange(n).remainder(200).float() + 0.5
    codes = dithered(x, rng(n)).float()
    assert codes.shape == x.shape and bool(((codes - x).abs() == 0.5).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_shapes_strides_and_dtypes(dtype: torch.dtype) -> None:
    x = (noise(1, 40, 30).abs() * 10).to(dtype).t()[::2]
    codes = dithered(x, rng(0))
    assert codes.shape == (15, 40) and codes.dtype == torch.uint8
    assert float((codes - x.float()).abs().max()) < 1
    assert dithered(torch.tensor(3.0), rng(0)).shape == ()


def test_sizes_alone_take_no_generator() -> None:
    x, memory = torch.empty(3, 5, device="meta"), Memory()
    codes = dithered(x, memory.generator(x.device))
    assert codes.shape == (3, 5) and codes.dtype == torch.uint8 and codes.is_meta


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: no NVIDIA GPU on this machine")
def test_on_a_gpu_it_rounds_up_and_down() -> None:
    x = torch.full((1_000_000,), 2.25, device="cuda")
    codes = dithered(x, Memory(1).generator(x.device))
    assert codes.device.type == "cuda" and set(codes.unique().tolist()) == {2, 3}
    assert float(codes.float().mean()) == pytest.approx(2.25, abs=0.003)
