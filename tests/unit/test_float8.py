"""Tests Float8 against its formats written out number by number, and the record."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, weights
from workbench.compressors import ByteGrad, Float8
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Memory
from workbench.settings import Change

pytestmark = pytest.mark.ranks

formats = pytest.mark.parametrize("to", ["e4m3", "e5m2"])
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reduced(codec: Float8, g: torch.Tensor, memories: list[Memory] | None = None) -> torch.Tensor:
    return exchange(codec, g.clone(), placed((g.shape[1],)), memories or [Memory(r) for r in range(len(g))])


def numbers(to: str) -> np.ndarray:
    """Returns all nonnegative numbers of a format, from its definition."""
    fraction, lowest, exponents = (3, -6, 15) if to == "e4m3" else (2, -14, 30)
    below = [k * 2.0 ** (lowest - fraction) for k in range(2**fraction)]
    normal = [(1 + k / 2**fraction) * 2.0 ** (lowest + e) for e in range(exponents) for k in range(2**fraction)]
    return np.array([v for v in below + normal if v <= LARGEST[to]])


def nearest(x: np.ndarray, to: str) -> np.ndarray:
    """Returns the distance of `x` from the nearest number of the format."""
    every = numbers(to)
    at = np.searchsorted(every, np.abs(x)).clip(1, len(every) - 1)
    return np.minimum(np.abs(np.abs(x) - every[at - 1]), np.abs(np.abs(x) - every[at]))


@formats
def test_the_formats_match_torchs_dtypes(to: str) -> None:
    every = numbers(to)
    assert every.max() == LARGEST[to] and len(every) == {"e4m3": 127, "e5m2": 124}[to]
    x = torch.tensor(every, dtype=torch.float32)
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        assert torch.equal(x.to(dtype).float(), x) == (name == to)


@formats
@pytest.mark.parametrize("block", [0, 64, 256])
def test_every_element_takes_the_nearest_number_of_its_blocks_format(to: str, block: int) -> None:
    x = noise(1, 1, 1024) ** 5
    out = reduced(Float8(to=to, block=block), x).numpy()
    per = x.view(-1, block or 1024).double().numpy()
    step = np.repeat(np.abs(per).max(1) / LARGEST[to], per.shape[1])
    exact = x[0].double().numpy()
    off, want = np.abs(out - exact), nearest(exact / step, to) * step
    assert np.all(np.abs(off - want) <= 1e-3 * want + 3e-7 * np.abs(exact) + 1e-30)


@pytest.mark.parametrize(("to", "off"), [("e4m3", 0.026), ("e5m2", 0.053)])
def test_the_error_on_heavy_tailed_numbers_is_the_measured_one(to: str, off: float) -> None:
    x = noise(2, 1, 100_000) * noise(3, 1, 100_000).exp()
    out = reduced(Float8(to=to, block=0), x)
    assert float((out - x[0]).norm() / x.double().norm()) == pytest.approx(off, rel=0.05)


@formats
def test_a_second_coding_on_one_rank_changes_nothing(to: str) -> None:
    """One rank codes twice like all ranks. Values in the format do not change."""
    x = noise(4, 1, 2000)
    codec = Float8(to=to)
    once = codec.restore(*codec.quantise(x.view(1, 8, 250), Memory()), Memory()).view(-1)
    torch.testing.assert_close(reduced(codec, x).float(), once, rtol=1e-6, atol=0)


@formats
def test_each_element_is_within_its_relative_error_of_each_hop(to: str) -> None:
    share, floor = {"e4m3": (1 / 16, 2.0**-10 / 448), "e5m2": (1 / 8, 2.0**-17 / 57344)}[to]
    g = noise(5, 4, 1000)
    out, exact = reduced(Float8(to=to, block=0), g), g.double().sum(0)
    first = (g.double().abs() * share).sum(0) + 4 * float(g.abs().max()) * floor
    second = (exact.abs() + first) * share + (float(exact.abs().max()) + float(first.max())) * floor
    assert bool(((out - exact).abs() <= (first + second) * (1 + 1e-5)).all())
    assert float((out - exact).norm() / exact.norm()) > 0.3 * share, "something was rounded"


def test_small_elements_are_as_exact_as_large_ones() -> None:
    x = noise(6, 1, 1024)
    x[0, ::2] *= 1e-3
    small = x[0, ::2].double()
    off = {
        c: float((exchange(c, x, placed((1024,)), [Memory()])[::2] - small).norm() / small.norm())
        for c in (Float8(block=0), Float8(to="e5m2", block=0), ByteGrad())
    }
    assert off[Float8(block=0)] < 0.05 and off[Float8(to="e5m2", block=0)] < 0.06 and off[ByteGrad()] > 0.9


@formats
def test_finite_values_stay_finite(to: str) -> None:
    """torch's bare cast to e5m2 does: 70000 is beyond its range."""
    assert bool(torch.tensor(70000.0).to(torch.float8_e5m2).float().isinf())
    for stochastic in (False, True):
        for scale in (3e38, 1e30, 1.0, 1e-30, 1e-38, 1e-44):
            x = noise(7, 1, 600)
            x = x / x.abs().max() * scale
            out = reduced(Float8(to=to, stochastic=stochastic), x)
            assert bool(out.isfinite().all()) and float(out.abs().max()) <= scale * 1.001
            assert scale < 1e-37 or float((out - x[0]).norm()) < 0.2 * float(x.double().norm())


@formats
def test_random_rounding_picks_a_neighbour_and_is_unbiased_through_both_hops(to: str) -> None:
    draws, ranks = 1500, 3  # each in a separate block
    g = noise(8, ranks, 64) ** 3
    exact = g.double().sum(0)
    codec = Float8(to=to, block=64, stochastic=True)
    off = reduced(codec, g.repeat(1, draws)).view(draws, 64) - exact
    spread = off.square().mean(0)
    u = draws * off.mean(0).square().sum() / spread.sum()
    freedom = spread.sum() ** 2 / spread.square().sum()
    assert abs(u - 1) < 5 * (2 / freedom) ** 0.5 + 5 / draws**0.5, (float(u), float(freedom))
    nearest_off = float((reduced(Float8(to=to, block=64), g.repeat(1, 3))[:64] - exact).square().sum())
    assert 1.2 < float(spread.sum()) / nearest_off < 3.5, "about twice the squares of rounding to the nearest"

    x = torch.cat([torch.full((1, 1), LARGEST[to]), noise(9, 1, 500).abs() * 3, noise(9, 1, 499) * 0.003], 1)
    scaled = codec.restore(*codec.quantise(x.view(1, 1, -1), Memory(1)), Memory()).view(-1).double().numpy()
    every = numbers(to)
    assert np.isin(np.abs(scaled), every).all()
    place = np.searchsorted(every, np.abs(x[0].double().numpy()), side="right")
    below, above = every[place - 1], every[np.minimum(place, len(every) - 1)]
    assert np.all((np.abs(scaled) == below) | (np.abs(scaled) == above)), "one of the two numbers beside it"
    assert np.all(scaled * x[0].double().numpy() >= 0)


def formula(session: Any, block: int) -> int:
    """Returns the bytes that one of 4 ranks sends per step: 2 hops, 3 peers, one chunk each."""
    total = 0
    for bucket in session.layout.buckets:
        m = math.ceil(bucket.data.numel() / 4)
        k = math.ceil(m / block) if block else 1
        total += 2 * 3 * (4 * k + k * math.ceil(m / k))
    return total


def test_recorded_bytes_follow_the_formula_before_and_after_live_changes() -> None:
    changes = [Change(3, "block", 64), Change(4, "to", "e5m2")]
    changes += [Change(5, "stochastic", True), Change(6, "bucket_mb", 0.02)]
    sessions = run(experiment(4, 9, compressor=Float8()), *changes)
    plain = run(experiment(4, 3, compressor=Float8()))[0]
    sent = [sum(n for k, _, n in sessions[0].record.comm() if k == step) for step in range(9)]
    assert sent[2] == formula(plain, 256) and sent[5] == formula(plain, 64) > sent[2]
    assert sent[8] == formula(sessions[0], 64)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


@formats
def test_it_trains_like_dense(to: str) -> None:
    coarse, dense = run(experiment(3, 10, compressor=Float8(to=to))), run(experiment(3, 10))
    torch.testing.assert_close(weights(coarse[0]), weights(dense[0]), rtol=0.1, atol=0.02)
    assert not torch.equal(weights(coarse[0]), weights(dense[0]))
