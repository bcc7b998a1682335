"""Tests the claim `strays` of codecs with levels: a tight bound, and its effect under error feedback."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import exchange, placed
from tests.unit.draws import drawn, heavy, noise
from workbench.compressors import ALQ, AMQ, NUQSGD, QSGD, ByteGrad, Compressor, ErrorFeedback, TernGrad
from workbench.compressors._levels import Levels, between, worst
from workbench.experiment import Experiment
from workbench.rank import Memory
from workbench.settings import KnobError, checked

pytestmark = pytest.mark.ranks
F64 = torch.float64

SETTLES = (
    QSGD(), QSGD(bits=3), QSGD(bits=3, exchange="two_hop"), QSGD(norm="l2", block=128), QSGD(bits=8, norm="l2"),
    NUQSGD(), NUQSGD(norm="max"), NUQSGD(exchange="two_hop"), NUQSGD(grid="code", norm="max"),
)  # fmt: skip
GROWS = (
    QSGD(bits=2, norm="l2", block=8192), QSGD(norm="l2"), QSGD(bits=3, norm="l2", exchange="two_hop"),
    NUQSGD(bits=3, block=8192), ALQ(bits=2),
)  # fmt: skip


def cost(r: torch.Tensor, levels: torch.Tensor) -> float:
    """Returns the mean square error of rounding r relative to r's square, from each element's two probabilities."""
    at = between(r.clone(), levels)
    k = at.floor().clamp(max=len(levels) - 2).int()
    low, high = levels[k], levels[k + 1]
    return float(((high - r) * (r - low)).sum() / r.square().sum())


@pytest.mark.parametrize(("bits", "d"), [(2, 64), (2, 8192), (3, 100), (4, 512), (4, 50), (8, 4096)])
def test_the_bound_of_equally_spaced_levels_is_the_closed_form_and_is_reached(bits: int, d: int) -> None:
    s = 2 ** (bits - 1) - 1
    levels, q = torch.linspace(-1, 1, 2 * s + 1, dtype=F64), d**0.5 / s
    bound = worst(levels, d)
    assert bound == pytest.approx(q - 1 if q >= 2 else q * q / 4, rel=1e-9)
    reached = torch.full((d,), d**-0.5, dtype=F64)
    if q < 2:  # all in the middle of a cell, except one at a level, which costs nothing and fills the norm up to 1
        reached = torch.full((d,), 0.5 / s, dtype=F64)
        reached[0] = 1.0
        assert bound / (1 + s * s * 4 / d) * 0.9 <= cost(reached / reached.norm(), levels) <= bound
    else:
        assert cost(reached, levels) == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_no_search_exceeds_the_bound(bits: int) -> None:
    for of in (NUQSGD(bits=bits), NUQSGD(bits=bits, grid="code"), NUQSGD(bits=bits, multiplier=0.8)):
        levels, d = of.levels(Memory()).double(), 200
        bound = worst(levels, d)
        found = 0.0
        for seed in range(20):
            for power in (0.0, 0.5, 1.0, 3.0):
                x = noise(seed, d).double()
                x = x.sign() * x.abs() ** power
                found = max(found, cost(x / x.norm(), levels))
        assert 0.2 * bound < found <= bound * (1 + 1e-9)


@pytest.mark.parametrize("of", SETTLES, ids=str)
def test_the_error_is_never_longer_than_claimed(of: Levels) -> None:
    for x in (noise(1, 1, 512), heavy(1, 512)[None], torch.ones(1, 512), torch.eye(512)[:1] + 0.03):
        off = drawn(of, x, 200) - x
        if of.norm == "max" and of.exchange == "gather":
            assert float(off.abs().max()) <= of.strays * float(x.abs().max()) * (1 + 1e-5)
        elif of.norm == "l2":
            assert float(off.norm(dim=-1).mean()) <= of.strays * float(x.norm()) * 1.02


def residual(of: Compressor, steps: int, n: int = 2 * 8192) -> tuple[float, float]:
    """Returns rank 0's (residual after so many steps, longest gradient), without checks of settings."""
    memories, rng, longest = [Memory(0), Memory(1)], torch.Generator().manual_seed(3), 0.0
    for _ in range(steps):
        g = torch.randn(2, n, generator=rng)
        longest = max(longest, float(g[0].norm()))
        exchange(ErrorFeedback(of=of), g, placed((n,)), memories)
    return float(memories[0].buffers["residual"]["p0"].norm()), longest


@pytest.mark.parametrize("of", SETTLES, ids=str)
def test_below_one_the_residual_stays_bounded(of: Levels) -> None:
    assert of.strays < 1 and checked(ErrorFeedback(of=of))
    few, longest = residual(of, 10)
    many, _ = residual(of, 40)
    assert many < 1.3 * few
    if of.norm == "l2":
        assert many < of.strays / (1 - of.strays) * longest


@pytest.mark.parametrize("of", GROWS, ids=str)
def test_refused_codecs_have_growing_residuals(of: Levels) -> None:
    few, longest = residual(of, 10)
    many, _ = residual(of, 30)
    assert many > 2 * few and many > 10 * longest
    with pytest.raises(
        KnobError, match=r"grow under error feedback|its error on a gradient plus a residual has no bound"
    ):
        Experiment(compressor=ErrorFeedback(of=of)).checked()


@pytest.mark.parametrize("of", [QSGD(bits=2), QSGD(norm="l2"), NUQSGD(norm="max", exchange="two_hop"), NUQSGD(bits=2),
                                NUQSGD(bits=3, multiplier=0.9, grid="code")], ids=str)  # fmt: skip
def test_a_refusal_names_the_knobs_and_a_valid_choice(of: Levels) -> None:
    said = str(of.refuses_feedback())
    assert f"bits={of.bits}, block={of.block}, norm={of.norm}, exchange={of.exchange}" in said
    bits = int(said.rpartition("bits=")[2].rstrip(")"))
    other = QSGD(bits=bits) if said.endswith("QSGD(bits=3)") else type(of)(
        **{**{k: getattr(of, k) for k in ("multiplier", "grid") if hasattr(of, k)},
           "norm": "max", "exchange": "gather", "bits": bits, "block": of.block})  # fmt: skip
    assert checked(ErrorFeedback(of=other))


@pytest.mark.parametrize("of", [ALQ(), AMQ(bits=8), ALQ(norm="max"), TernGrad()], ids=str)
def test_codecs_without_a_bound_are_refused_with_any_knobs(of: Compressor) -> None:
    with pytest.raises(KnobError, match=f"of={type(of).__name__}"):
        Experiment(compressor=ErrorFeedback(of=of)).checked()
    assert checked(of)


BYTES = [ByteGrad(bits=b, stochastic=s, block=k) for b in (2, 4, 8) for s in (False, True) for k in (0, 64)]


@pytest.mark.parametrize("of", [of for of in BYTES if (of.bits, of.stochastic) != (2, True)], ids=str)
def test_min_max_codes_respect_the_claimed_error(of: ByteGrad) -> None:
    ends = torch.tensor([-1.0, 1.0]).repeat(256) * 0.999 ** torch.arange(512)
    for x in (noise(1, 1, 512), heavy(1, 512)[None], ends[None]):
        memory = [Memory(0)]
        once = exchange(ErrorFeedback(of=of), x.clone(), placed((512,)), memory)
        assert float((once - x).abs().max()) <= of.strays * float(x.abs().max()) * (1 + 1e-5)
    few, longest = residual(of, 10)
    assert of.strays < 1 and residual(of, 30)[0] < 1.3 * few and few < 2.5 * longest
    assert checked(ErrorFeedback(of=of))


def test_two_bits_with_random_rounding_are_refused_with_a_valid_choice() -> None:
    of = ByteGrad(bits=2, stochastic=True)
    assert of.strays == pytest.approx(4 / 3) and residual(of, 30)[0] > 20 * residual(of, 10)[1]
    with pytest.raises(KnobError, match=r"grow under error feedback.*or set stochastic=False or bits=4"):
        Experiment(compressor=ErrorFeedback(of=of)).checked()
    assert checked(ErrorFeedback(of=ByteGrad(bits=2))) and checked(ErrorFeedback(of=ByteGrad(bits=4, stochastic=True)))
    assert checked(of), "without feedback it is as it was"
