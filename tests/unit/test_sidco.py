"""Compares SIDCo with known thresholds of distributions, with the authors' formulas, and with the record."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.ranks import exchange, experiment, placed, run
from workbench import simulate
from workbench.compressors import SIDCo
from workbench.compressors.sidco import _gamma_quantile
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory
from workbench.settings import Change, KnobError, knobs

pytestmark = pytest.mark.ranks

N = 10**6
FITS = next(k for k in knobs(SIDCo) if k.name == "fit").choices


def uniform(seed: int, n: int) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def signed(size: torch.Tensor, seed: int) -> torch.Tensor:
    return (size * torch.where(uniform(seed + 100, len(size)) < 0.5, -1.0, 1.0)).float()


def laplace(seed: int, n: int) -> torch.Tensor:
    return signed(-0.3 * torch.log1p(-uniform(seed, n)), seed)


def normal(seed: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def pareto(shape: float, seed: int, n: int) -> torch.Tensor:
    """Returns generalised Pareto magnitudes of scale 2."""
    return signed(2 * torch.expm1(-shape * torch.log1p(-uniform(seed, n))) / shape, seed)


def gamma(shape: float, seed: int, n: int) -> torch.Tensor:
    """Returns gamma magnitudes, by inverting the distribution function on a fine grid."""
    grid = torch.logspace(-12, 2.5, 200_000, dtype=torch.float64)
    below = torch.special.gammainc(torch.tensor(shape, dtype=torch.float64), grid)
    at = torch.searchsorted(below, uniform(seed, n)).clamp_(max=len(grid) - 1)
    return signed(grid[at], seed)


DATA = {
    "laplace": laplace,
    "normal": normal,
    "pareto 0.2": lambda s, n: pareto(0.2, s, n),
    "pareto 0.4": lambda s, n: pareto(0.4, s, n),
    "gamma 0.5": lambda s, n: gamma(0.5, s, n),
    "gamma 2": lambda s, n: gamma(2.0, s, n),
}


def share(x: torch.Tensor, t: float) -> float:
    return float((x.abs() > t).double().mean())


def sent(codec: SIDCo, x: torch.Tensor, memory: Memory) -> float:
    """Returns the chosen entries relative to k."""
    index, _ = codec.choose(x, memory, Bucket(0, x, tuple(placed(tuple(x.shape))), 0))
    assert index.unique().shape == index.shape
    return index.numel() / max(1, round(codec.density * x.numel()))


@pytest.mark.parametrize("density", [0.25, 0.01, 0.001])
def test_one_fit_to_laplace_entries_gives_the_exact_threshold(density: float) -> None:
    """t = -mean ln(density); the share that exceeds it spreads by 1 / sqrt(density n)."""
    x = laplace(1, N)
    t = SIDCo(density=density, stages=1).threshold_of(x.abs(), round(density * N), 1)
    assert t == pytest.approx(-0.3 * math.log(density), rel=0.01)
    assert share(x, t) / density == pytest.approx(1, abs=0.05 + 4 / math.sqrt(density * N))


@pytest.mark.parametrize("density", [0.25, 0.01, 0.001])
@pytest.mark.parametrize("shape", [0.2, 0.1, -0.3])
def test_one_fit_to_pareto_entries_is_close(density: float, shape: float) -> None:
    x = pareto(shape, 2, N)
    t = SIDCo(fit="pareto").threshold_of(x.abs(), round(density * N), 1)
    assert t == pytest.approx(2 * (density**-shape - 1) / shape, rel=0.05)


@pytest.mark.parametrize("density", [0.25, 0.01, 0.001])
@pytest.mark.parametrize("shape", [0.3, 1.0, 3.0])
def test_one_fit_to_gamma_entries_is_close(density: float, shape: float) -> None:
    x = gamma(shape, 3, N)
    t = SIDCo(fit="gamma").threshold_of(x.abs(), round(density * N), 1)
    assert share(x, t) / density == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("shape", [0.02, 0.3, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.01, 1e-4])
def test_the_gamma_quantile_inverts_the_distribution(shape: float, ratio: float) -> None:
    t = torch.tensor(_gamma_quantile(shape, ratio), dtype=torch.float64)
    got = float(torch.special.gammaincc(torch.tensor(shape, dtype=torch.float64), t))
    assert got == pytest.approx(ratio, rel=0.01)


def test_the_authors_gamma_threshold_is_exact_for_shape_one_only() -> None:
    """The threshold is -(ln r + ln Gamma(shape)) times the scale, as in the docstring."""
    for shape, near in ((1.0, True), (0.3, False), (3.0, False)):
        theirs = -(math.log(0.01) + math.lgamma(shape))
        assert (abs(theirs / _gamma_quantile(shape, 0.01) - 1) < 0.001) == near


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("fit", ["exponential", "pareto", "gamma"])
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_the_sent_entries_are_within_20_percent_of_k_once_the_fits_have_settled(
    data: str, fit: str, density: float
) -> None:
    memory, codec = Memory(), SIDCo(density=density, fit=fit)
    xs = [DATA[data](seed, 60_000) for seed in range(2)]
    ratios = [sent(codec, xs[step % 2], memory) for step in range(60)]
    last = ratios[-10:]
    assert 0.8 <= sum(last) / len(last) <= 1.2


def test_one_exponential_fit_alone_is_far_off_for_other_tails() -> None:
    """This is why there are several fits: one sends 10 % of the target for normal entries, ten times it for heavy
    tails.
    """
    assert sent(SIDCo(stages=1), normal(1, N), Memory()) < 0.1
    assert sent(SIDCo(stages=1, density=0.001), pareto(0.4, 1, N), Memory()) > 10


def test_more_fits_are_more_accurate() -> None:
    off = [abs(sent(SIDCo(stages=s), normal(2, N), Memory()) - 1) for s in (1, 2, 4, 7)]
    assert all(b < a for a, b in pairwise(off)) and off[-1] < 0.1


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("fit", FITS)
def test_after_five_inaccurate_exchanges_one_more_fit_is_more_accurate(data: str, fit: str) -> None:
    memory, codec, x = Memory(), SIDCo(density=0.001, fit=fit), DATA[data](1, 60_000)
    off = [abs(sent(codec, x, memory) - 1) for _ in range(6)]
    assert len(set(off[:5])) == 1
    assert off[5] < off[4] if off[4] > 0.2 else off[5] == off[4]


def test_the_number_of_fits_is_kept_per_bucket_and_rank() -> None:
    parts, memories = placed((20_000,), (20_000,)), [Memory(), Memory()]
    for step in range(30):
        g = torch.stack([torch.cat([laplace(step + r, 20_000), normal(step + r, 20_000)]) for r in range(2)])
        for part in parts:
            exchange(SIDCo(), g, [part], memories)
    for memory in memories:
        known = memory.parts[SIDCo.buffer]
        assert known["p1"][0] > known["p0"][0]
    assert "sidco" not in memories[0].buffers


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("stages", [0, 1, 3])
def test_every_bucket_sends_something(fit: str, stages: int) -> None:
    """Something is sent, including the largest, for equal entries, one entry, two, or a large offset."""
    for x in (
        torch.ones(1000),
        torch.tensor([0.25]),
        torch.tensor([-3.0, 1.0]),
        1e6 + torch.linspace(-1, 1, 500),
        torch.cat([torch.zeros(999), torch.ones(1)]),
        torch.full((300,), 1e-30),
        torch.full((300,), 1e30),
    ):
        bucket = Bucket(0, x, tuple(placed(tuple(x.shape))), 0)
        index, values = SIDCo(fit=fit, stages=stages).choose(x, Memory(), bucket)
        assert len(index) and values.abs().max() == x.abs().max() and bool((values != 0).all())


@pytest.mark.parametrize("fit", FITS)
def test_fits_of_a_sparse_gradient_use_its_nonzero_entries(fit: str) -> None:
    x = laplace(5, 200_000)
    x[uniform(9, 200_000) < 0.95] = 0.0
    memory = Memory()
    ratios = [sent(SIDCo(fit=fit), x, memory) for _ in range(30)]
    assert 0.8 <= ratios[-1] <= 1.2
    few = torch.zeros(200_000)
    few[:50] = 1.0
    assert sent(SIDCo(fit=fit), few, Memory()) == 50 / 2000, "what is not zero is less than k: all of it"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("fit", FITS)
def test_non_finite_values_pass_on_without_effect_on_the_choice(fit: str, bad: float) -> None:
    x = laplace(6, 50_000)
    memory = Memory()
    before = sent(SIDCo(fit=fit), x, memory)
    x[7] = bad
    index, values = SIDCo(fit=fit).choose(x, memory, Bucket(0, x, tuple(placed((50_000,))), 0))
    assert 7 in index.tolist() and int(values.isfinite().sum()) == len(values) - 1
    assert len(index) / 500 == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_give_the_same_choice(dtype: torch.dtype) -> None:
    x = laplace(7, 50_000)
    assert sent(SIDCo(), x.to(dtype), Memory()) == pytest.approx(sent(SIDCo(), x, Memory()), rel=0.1)


def test_fits_do_not_depend_on_scale() -> None:
    x = normal(3, 50_000).abs()
    for fit in FITS:
        t = partial(SIDCo(fit=fit).threshold_of, wanted=5_000, stages=1)
        assert t(1e-20 * x) == pytest.approx(1e-20 * t(x), rel=1e-4)
        assert t(1e15 * x) == pytest.approx(1e15 * t(x), rel=1e-4)


def test_live_changes_of_knobs_take_effect_in_the_next_step_and_ranks_agree() -> None:
    changes = [Change(4, "density", 0.2), Change(8, "fit", "gamma"), Change(10, "bucket_mb", 0.02)]
    changes += [Change(12, "stages", 5)]
    sessions = run(experiment(3, 16, compressor=SIDCo.usual()), *changes)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1

    def kept(step: int) -> float:
        shares = [v for s, what, _, v in sessions[0].record.samples if what == "density" and s == step]
        return sum(shares) / len(shares)

    assert kept(3) < 0.05 < 0.1 < kept(4) < 0.4 and len({kept(step) for step in (7, 8, 12)}) == 3


def test_engine_and_simulator_send_the_same() -> None:
    e = experiment(3, 8, compressor=SIDCo.usual())
    session = run(e)[0]
    spans = simulate(e.set("pace", 10), real=True).spans
    mine = spans[(spans["rank"] == 0) & (spans.lane == "comm")].sort_values("t0", kind="stable")
    assert [n for _, _, n in session.record.comm()] == mine.nbytes.tolist()


@pytest.mark.parametrize(
    ("path", "value", "allowed"),
    [
        ("fit", "normal", "one of exponential, pareto, gamma"),
        ("stages", 15, r"an integer in \[0, 14\] fits"),
        ("density", 0, r"a number in \[0.0001, 1\]"),
    ],
)
def test_invalid_knobs_raise_knob_error_with_the_allowed_values(path: str, value: object, allowed: str) -> None:
    with pytest.raises(KnobError, match=f"compressor.of.{path}=.*must be {allowed}"):
        experiment(compressor=SIDCo.usual()).set(path, value)
