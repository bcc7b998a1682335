"""Tests E3M0: rounding to 4 bits, packing, and the mean over ranks."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from workbench.compressors import E3M0
from workbench.compressors.e3m0 import BLOCK_ELEMENTS, nbytes
from workbench.rank import Op, Rank
from workbench.strategies._coded import mean


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    return E3M0().decode(E3M0().encode(x), x.float())


def encode(x: torch.Tensor) -> torch.Tensor:
    [code] = E3M0().encode(x)
    return code


def noise(n: int, seed: int = 0) -> torch.Tensor:
    """Returns numbers of all magnitudes."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=rng) * torch.exp2(torch.randint(-12, 3, (n,), generator=rng).float())


@pytest.mark.parametrize("n", [0, 1, 2, 3, 255, 256, 257, 1000])
def test_a_payload_has_half_a_byte_per_element_and_four_per_block(n: int) -> None:
    code = encode(noise(n))
    assert code.dtype == torch.uint8 and code.numel() == nbytes(n) == 4 * math.ceil(n / 256) + math.ceil(n / 2)
    assert there_and_back(noise(n)).shape == (n,)
    sizes = encode(torch.empty(n, device="meta"))
    assert (sizes.shape, sizes.dtype) == (code.shape, code.dtype)
    assert E3M0().decode((sizes,), torch.empty(n, device="meta")).shape == (n,)


def test_there_are_eight_magnitudes_the_powers_of_two_below_the_largest_and_zero() -> None:
    x = torch.cat([torch.linspace(0, 0.3, BLOCK_ELEMENTS // 2), torch.linspace(0.3, 3.0, BLOCK_ELEMENTS // 2)])
    assert {float(v) for v in there_and_back(x).unique()} == {0.0, *(3.0 * 2.0**-k for k in range(7))}


@pytest.mark.parametrize("seed", range(5))
def test_the_nearest_level_is_taken(seed: int) -> None:
    x = noise(3 * BLOCK_ELEMENTS + 17, seed)
    back = there_and_back(x)
    for block, found in zip(x.split(BLOCK_ELEMENTS), back.split(BLOCK_ELEMENTS), strict=True):
        s = float(block.abs().max())
        levels = torch.tensor([0.0, *(s * 2.0**-k for k in range(7)), *(-s * 2.0**-k for k in range(7))])
        nearest = (block.unsqueeze(1) - levels).abs().amin(1)
        torch.testing.assert_close((block - found).abs(), nearest, rtol=1e-5, atol=1e-6 * s)


@pytest.mark.parametrize("seed", range(5))
def test_the_error_is_within_its_bound_and_nearly_reaches_it(seed: int) -> None:
    x = noise(2000, seed)
    scale = torch.cat([b.abs().max().expand(b.numel()) for b in x.split(BLOCK_ELEMENTS)])
    over = (x - there_and_back(x)).abs() / torch.maximum(x.abs() / 3, scale / 128)
    assert 0.9 < float(over.max()) <= 1 + 1e-5


@pytest.mark.parametrize("seed", range(5))
def test_encoding_a_decoded_value_changes_nothing(seed: int) -> None:
    once = there_and_back(noise(1000, seed))
    assert torch.equal(there_and_back(once), once)


def test_the_codec_is_odd() -> None:
    x = noise(1000)
    assert torch.equal(there_and_back(-x), -there_and_back(x))


def test_the_codec_is_monotone() -> None:
    back = there_and_back(noise(BLOCK_ELEMENTS).sort().values)
    assert bool((back.diff() >= 0).all()) and len(back.unique()) > 8


def test_the_codec_is_independent_of_scale() -> None:
    x = noise(1000)
    assert torch.equal(there_and_back(x * 2.0**20), there_and_back(x) * 2.0**20)
    assert bool(there_and_back(torch.full((5,), 3e38)).isfinite().all())
    torch.testing.assert_close(there_and_back(torch.full((5,), 1e-40)), torch.full((5,), 1e-40), rtol=0, atol=1e-43)


def test_zeros_and_single_elements_come_back_unchanged() -> None:
    assert torch.equal(there_and_back(torch.zeros(700)), torch.zeros(700))
    for value in (2.5, -1e-3, 0.0):
        assert torch.equal(there_and_back(torch.tensor([value])), torch.tensor([value]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floats_and_strided_views_give_the_codes_of_float32_copies(dtype: torch.dtype) -> None:
    wide = noise(1200).clamp(-1e4, 1e4).to(dtype)
    assert torch.equal(there_and_back(wide[::3]), there_and_back(wide[::3].contiguous().float()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_only_its_block(bad: float) -> None:
    x = noise(3 * BLOCK_ELEMENTS)
    want = there_and_back(x)
    x[BLOCK_ELEMENTS + 5] = bad
    back = there_and_back(x)
    assert bool(back[BLOCK_ELEMENTS : 2 * BLOCK_ELEMENTS].isnan().all())
    assert torch.equal(back[:BLOCK_ELEMENTS], want[:BLOCK_ELEMENTS]) and torch.equal(
        back[2 * BLOCK_ELEMENTS :], want[2 * BLOCK_ELEMENTS :]
    )


def agreed(xs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """Runs `mean` on all ranks at once, without connections: (each rank's result, bytes that each sends)."""
    p = len(xs)
    coros: list[Coroutine[Op, Any, torch.Tensor]] = [mean(Rank(r, p), x, E3M0(), "x") for r, x in enumerate(xs)]
    ops, sent, found = [c.send(None) for c in coros], [0] * p, []
    while not found:
        rows = [op.args[0] for op in ops]
        if ops[0].verb == "all_to_all":
            answers = [torch.stack([rows[source][r] for source in range(p)]) for r in range(p)]
            sent = [n + (p - 1) * row[0].numel() for n, row in zip(sent, rows, strict=True)]
        else:
            answers = [torch.stack(rows)] * p
            sent = [n + (p - 1) * row.numel() for n, row in zip(sent, rows, strict=True)]
        ops = []
        for c, answer in zip(coros, answers, strict=True):
            try:
                ops.append(c.send(answer))
            except StopIteration as stop:
                found.append(stop.value)
    return found, sent


@pytest.mark.parametrize(("p", "n"), [(1, 10), (2, 1), (3, 1000), (4, 4096), (4, 7), (8, 3001)])
def test_the_mean_is_equal_on_all_ranks_and_made_of_twice_rounded_values(p: int, n: int) -> None:
    xs = [noise(n, r) for r in range(p)]
    found, sent = agreed(xs)
    chunk = math.ceil(n / p)
    want = []
    for at in range(0, n, chunk):
        total = sum(there_and_back(torch.nn.functional.pad(x, (0, p * chunk - n))[at : at + chunk]) for x in xs)
        want.append(there_and_back(total / p))
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], torch.cat(want)[:n])
    assert sent == [2 * (p - 1) * (math.ceil(chunk / 2) + 4 * math.ceil(chunk / 256))] * p


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_two_hops_send_about_two_pths_of_the_bytes_of_an_all_gather(p: int) -> None:
    _, sent = agreed([noise(24_000, r) for r in range(p)])
    gathered = (p - 1) * encode(noise(24_000)).numel()
    assert max(sent) / gathered == pytest.approx(2 / p, rel=0.01)
