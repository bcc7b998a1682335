"""Compares the rounding cost of NUQSGD's levels with its bounds and with uniform levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run
from tests.unit.draws import drawn, heavy, noise
from workbench.compressors import NUQSGD, QSGD
from workbench.compressors._levels import Levels, between
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Memory
from workbench.settings import Change

pytestmark = pytest.mark.ranks


def costs(of: Levels, x: torch.Tensor, block: int) -> float:
    """Computes E |C(x) - x|^2 / |x|^2 from the definition, without random draws."""
    rows = x.double().numpy().reshape(-1, block)
    size = np.linalg.norm(rows, axis=1) if of.norm == "l2" else np.abs(rows).max(1)
    r, levels = rows / size[:, None], of.levels(Memory()).double().numpy()
    at = np.clip(np.searchsorted(levels, r, side="right") - 1, 0, len(levels) - 2)
    return float(np.sum(size[:, None] ** 2 * (levels[at + 1] - r) * (r - levels[at])) / np.sum(rows**2))


@pytest.mark.parametrize(("bits", "s"), [(2, 0), (3, 2), (4, 6), (5, 14)])
def test_levels_are_zero_and_the_powers_that_fit_the_bits(bits: int, s: int) -> None:
    up = [2.0**-j for j in range(s, -1, -1)]
    assert NUQSGD(bits=bits).levels(Memory()).tolist() == [-x for x in reversed(up)] + [0.0, *up]
    code = NUQSGD(bits=bits, grid="code", multiplier=0.7).levels(Memory()).double()
    assert len(code) == 2**bits and not (code == 0).any()
    torch.testing.assert_close(
        code[len(code) // 2 :], 0.7 ** torch.arange(2 ** (bits - 1) - 1, -1, -1).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("grid", ["paper", "code"])
def test_levels_ascend_from_minus_one_to_one(bits: int, grid: str) -> None:
    for multiplier in (0.1, 0.5, 0.9):
        levels = NUQSGD(bits=bits, grid=grid, multiplier=multiplier).levels(Memory())
        assert levels[0] == -1 and levels[-1] == 1 and len(levels) <= 2**bits
        assert bool((levels.diff() >= 0).all()) and torch.equal(levels, -levels.flip(0))


@pytest.mark.parametrize(("bits", "s"), [(2, 0), (3, 2), (4, 6), (5, 14)])
def test_the_variance_is_within_the_bound(bits: int, s: int) -> None:
    n = 4096
    for x in (noise(1, n), heavy(1, n)):
        cost = costs(NUQSGD(bits=bits, block=n), x, n)
        assert cost <= 1 / 8 + min(2.0 ** (-2 * s - 2) * n, 2.0**-s * n**0.5)
        each = (drawn(NUQSGD(bits=bits, block=n), x[None], 200) - x).square().sum(1) / x.square().sum()
        assert abs(float(each.mean()) - cost) < 5 * float(each.std()) / 200**0.5 + 1e-9


@pytest.mark.parametrize("ratio", [1.25, 2.0, 4.0])
def test_the_relative_cost_between_two_levels_is_bounded_by_their_ratio(ratio: float) -> None:
    low, high = 0.3 / ratio, 0.3
    levels = torch.tensor([-1.0, low, high, 1.0])
    r = torch.linspace(low, high, 4001)[:-1]
    share = between(r.clone(), levels).double().frac()
    cost = (high - low) ** 2 * share * (1 - share) / r.double() ** 2
    bound = (ratio - 1) ** 2 / (4 * ratio)
    assert bound * 0.999 < float(cost.max()) < bound * 1.001


def test_the_cheaper_levels_depend_on_the_norm_and_the_data() -> None:
    """Eight magnitudes each; blocks of 64 to 32768 normal and heavy-tailed elements."""
    published = {
        ("l2", 64): (0.22, 0.08),
        ("l2", 512): (1.58, 0.09),
        ("l2", 4096): (6.29, 0.18),
        ("l2", 32768): (19.6, 1.26),
        ("max", 64): (0.023, 0.073),
        ("max", 512): (0.037, 0.081),
        ("max", 4096): (0.049, 0.082),
        ("max", 32768): (0.063, 0.082),
    }
    x, tails = noise(5, 2**19), heavy(5, 2**19)
    for (norm, block), (even, halving) in published.items():
        assert costs(QSGD(norm=norm, block=block), x, block) == pytest.approx(even, rel=0.08)
        assert costs(NUQSGD(norm=norm, block=block), x, block) == pytest.approx(halving, rel=0.08)
        assert costs(NUQSGD(norm=norm, block=block), tails, block) < costs(QSGD(norm=norm, block=block), tails, block)


def test_halves_of_a_power_of_two_are_decoded_exactly() -> None:
    x = noise(3, 1, 4096)
    x[0, 17] = 8.0
    for grid in ("paper", "code"):
        for bits in (4, 8):
            out = exchange(NUQSGD(bits=bits, norm="max", block=4096, grid=grid), x, placed((4096,)), [Memory()])
            parts = torch.frexp(out[out != 0].abs())
            assert bool((parts.mantissa == 0.5).all()) and len(parts.exponent.unique()) > 3


def test_without_a_zero_level_only_a_block_of_zeros_is_zero() -> None:
    x = torch.zeros(1, 8192)
    x[0, 0], x[0, 4096:] = 1.0, 0.0
    out = exchange(NUQSGD(bits=3, norm="max", block=4096, grid="code"), x, placed((8192,)), [Memory()])
    assert set(out[1:4096].abs().tolist()) == {0.125} and not out[4096:].any()
    assert abs(float((out[1:4096] > 0).double().mean()) - 0.5) < 5 * 0.5 / 4095**0.5


def test_every_knob_changes_live() -> None:
    names = {"bits": 3, "multiplier": 0.3, "grid": "code", "norm": "max", "block": 64, "exchange": "two_hop"}
    changes = [Change(2 + at, name, to) for at, (name, to) in enumerate(names.items())]
    sessions = run(experiment(3, 10, compressor=NUQSGD()), *changes)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    sent = [sum(n for k, _, n in sessions[0].record.comm() if k == step) for step in range(10)]
    assert sent[1] > sent[2] == sent[3] == sent[5] < sent[6], sent
    asked = [{name.split()[0] for k, name, _ in sessions[0].record.comm() if k == step} for step in (6, 7)]
    assert asked == [{"all_gather"}, {"all_to_all", "all_gather"}]
