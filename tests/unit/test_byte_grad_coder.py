"""Tests 8-bit codes between a tensor's smallest and largest value."""

from __future__ import annotations

import pytest
import torch

from workbench.compressors import ByteGrad
from workbench.rank import Memory

pytestmark = pytest.mark.ranks


CODER = ByteGrad().coder(Memory())


def encode(x: torch.Tensor) -> torch.Tensor:
    [code] = CODER.encode(x)
    return code


def back(x: torch.Tensor) -> torch.Tensor:
    """Encodes and decodes."""
    return CODER.decode((encode(x),), x)


def noise(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3, 255, 1001])
def test_a_code_has_one_byte_per_element_and_a_header(n: int, dtype: torch.dtype) -> None:
    for x in (noise(n, dtype=dtype), torch.empty(n, dtype=dtype, device="meta")):
        code = encode(x)
        assert code.dtype == torch.uint8 and code.shape == (8 + n,)
        assert back(x).dtype == dtype and back(x).shape == (n,)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_the_error_is_at_most_half_a_code(seed: int, scale: float) -> None:
    x = noise(999, seed) ** 3 * scale
    half = float(x.max() - x.min()) / 510
    assert float((back(x) - x).abs().max()) <= half * 1.001


def test_the_ends_get_the_first_and_the_last_code() -> None:
    x = torch.arange(256.0) * 3 - 100
    assert encode(x)[8:].tolist() == list(range(256))
    assert torch.equal(back(x), x), "a step of 3 loses nothing"


@pytest.mark.parametrize("value", [0.0, -0.25, 1.0, 3e38, 1e-45])
@pytest.mark.parametrize("n", [1, 7])
def test_equal_values_come_back_unchanged(value: float, n: int) -> None:
    x = torch.full((n,), value)
    assert torch.equal(back(x), x)


def test_a_huge_offset_never_wraps() -> None:
    """Codes computed as round(x * s) would exceed the byte here: the range is a few float32 spacings around 1."""
    for seed in range(500):
        x = (1 + 1e-6 * noise(100, seed, torch.float64)).float()
        codes, spread = encode(x)[8:].int(), float(x.max() - x.min())
        assert codes.min() == 0 and codes.max() == 255
        assert bool((codes[x.argsort()].diff() >= 0).all()), "in the order of the values"
        assert float((back(x) - x).abs().max()) <= spread / 510 + 1.2e-7


def test_the_widest_range_stays_finite() -> None:
    x = torch.tensor([-3e38, -1e38, 0.0])
    torch.testing.assert_close(back(x), x, rtol=0, atol=3e38 / 510 * 1.001)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_visible(bad: float) -> None:
    x = noise(50)
    x[7] = bad
    out = back(x)
    assert not bool(out[7].isfinite()), "nor does it become a number"
    assert bool(back(noise(50)).isfinite().all())
    assert encode(x).dtype == torch.uint8
