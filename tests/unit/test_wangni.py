"""Tests Wangni's sparsification against the paper's closed form, and the statistics of its probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, together
from workbench import simulate
from workbench.compressors import ErrorFeedback, Wangni
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Op, Rank
from workbench.settings import Change, KnobError

pytestmark = pytest.mark.ranks


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def skewed(seed: int, n: int) -> torch.Tensor:
    """Returns a few large entries among many small ones; some are zero."""
    x = noise(seed, n) ** 3
    x[::10] = 0.0
    return x


def chances(codec: Wangni, x: torch.Tensor) -> np.ndarray:
    """Returns p_i, computed from the one number that the codec finds."""
    size = x.abs().double().numpy()
    return np.minimum(1.0, size / codec.scale_of(x.abs()))


def sorted_closed_form(x: torch.Tensor, budget: float) -> np.ndarray:
    """Returns the probabilities of the paper's closed form, found in sorted order. The form takes the smallest k for
    which the remaining entries may be proportional.
    """
    size = x.abs().double().numpy()
    order = np.sort(size)[::-1]
    total = (size**2).sum()
    for k in range(len(size)):
        tail = order[k:]
        if order[k] * tail.sum() <= budget * total + (tail**2).sum():
            break
    scale = tail.sum() / (budget * total + (tail**2).sum())
    return np.minimum(1.0, scale * size)


def greedy(x: torch.Tensor, density: float, rounds: int) -> np.ndarray:
    """Returns the probabilities of the paper's greedy rule."""
    size = x.abs().double().numpy()
    n = len(size)
    p = np.minimum(1.0, density * n * size / size.sum())
    for _ in range(rounds):
        open_ = p < 1
        c = (density * n - n + open_.sum()) / p[open_].sum()
        if c <= 1:
            break
        p = np.minimum(1.0, c * p)
    return p


def once(codec: Wangni, x: torch.Tensor, memory: Memory) -> torch.Tensor:
    return exchange(codec, x[None], placed((x.numel(),)), [memory])


def noted(codec: Wangni, x: torch.Tensor, seed: int = 0) -> tuple[dict[str, float], torch.Tensor]:
    """Returns the samples of one exchange of two ranks, and rank 0's message."""
    seen: list[Op] = []
    buckets = [Bucket(0, x.clone(), tuple(placed((x.numel(),))), 0) for _ in range(2)]
    together([codec.reduce(Rank(r, 2), b, Memory(seed + r)) for r, b in enumerate(buckets)], seen)
    sent = next(op for op in seen if op.verb == "all_to_allv").args[0][0]
    return {op.args[0]: op.args[1] for op in seen if op.verb == "sample"}, sent


@pytest.mark.parametrize("n", [7, 500, 300_000])
@pytest.mark.parametrize("variance", [0.01, 0.1, 1.0, 4.0, 100.0])
def test_the_variance_equals_the_budget_and_probabilities_equal_the_sorted_closed_form(n: int, variance: float) -> None:
    for x in (noise(n, n), skewed(n, n)):
        p = chances(Wangni(rule="variance", variance=variance), x)
        size = x.abs().double().numpy()
        spent = (size[size > 0] ** 2 / p[size > 0]).sum()
        assert spent == pytest.approx((1 + variance) * (size**2).sum(), rel=1e-5)
        if n <= 500:
            np.testing.assert_allclose(p, sorted_closed_form(x, variance), rtol=1e-5)


@pytest.mark.parametrize("density", [0.01, 0.05, 0.2, 0.7])
def test_probabilities_sum_to_the_density(density: float) -> None:
    for x in (noise(1, 4000), skewed(2, 4000)):
        p = chances(Wangni(density=density), x)
        assert p.sum() == pytest.approx(density * 4000, rel=1e-5)
        assert p.max() <= 1 and np.all(np.diff(p[np.argsort(x.abs().numpy())]) >= 0)


@pytest.mark.parametrize("density", [0.01, 0.05, 0.2])
def test_probabilities_equal_the_converged_greedy_rule_of_the_paper(density: float) -> None:
    for x in (noise(3, 4000), skewed(4, 4000)):
        np.testing.assert_allclose(chances(Wangni(density=density), x), greedy(x, density, 50), rtol=1e-5)
    x = noise(3, 4000)
    np.testing.assert_allclose(chances(Wangni(density=density), x), greedy(x, density, 2), rtol=1e-5)


FEW = [Wangni(density=0.05), Wangni(density=0.3), Wangni(rule="variance", variance=0.5)]


@pytest.mark.parametrize("codec", FEW, ids=str)
def test_the_number_of_survivors_agrees_with_the_probabilities(codec: Wangni) -> None:
    """The count is a sum of independent draws: its mean over T steps has standard deviation sqrt(sum of p (1 - p) /
    T).
    """
    x, draws, memory = skewed(5, 2000), 400, Memory(1)
    p = chances(codec, x)
    counts = [int(once(codec, x, memory).count_nonzero()) for _ in range(draws)]
    assert abs(np.mean(counts) - p.sum()) < 5 * (np.sum(p * (1 - p)) / draws) ** 0.5


@pytest.mark.parametrize("codec", [Wangni(density=0.02), Wangni(density=0.3), Wangni(rule="variance")], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_unbiased_with_the_variance_of_its_probabilities(codec: Wangni, seed: int) -> None:
    x, draws, memory = skewed(seed, 300), 800, Memory(seed)
    off = torch.stack([once(codec, x, memory) - x for _ in range(draws)])
    spread = off.square().mean(0)
    u = draws * off.mean(0).square().sum() / spread.sum()
    freedom = spread.sum() ** 2 / spread.square().sum()
    assert abs(u - 1) < 5 * (2 / freedom) ** 0.5 + 5 / draws**0.5
    p, size = chances(codec, x), x.double().numpy()
    want = (size[p > 0] ** 2 / p[p > 0]).sum() - (size**2).sum()
    each = off.square().sum(1)
    assert abs(float(each.mean()) - want) < 5 * float(each.std()) / draws**0.5


def test_it_is_unbiased_in_bfloat16() -> None:
    """u is rounded before the probabilities are computed from it. With later rounding all survivors would be 0.16 % too
    small.
    """
    n, draws, memory = 4 * 10**6, 10, Memory(3)
    x = torch.ones(n, dtype=torch.bfloat16)
    total = sum(float(once(Wangni(density=0.3), x, memory).sum()) for _ in range(draws))
    spread = ((1 / 0.3 - 1) / (n * draws)) ** 0.5
    assert abs(total / (n * draws) - 1) < 5 * spread < 0.0013


def test_noise_on_normal_entries_matches_the_docstring_and_is_below_random_ks() -> None:
    x = noise(9, 200_000).double()
    for density in (0.01, 0.05):
        p = chances(Wangni(density=density), x)
        factor = float((x.numpy() ** 2 / p).sum() / (x**2).sum()) - 1
        assert factor == pytest.approx(2 / np.pi / density - 1, rel=0.02) and factor < 1 / density - 1


def test_a_message_is_a_header_pairs_of_exact_entries_and_an_index_and_a_bit_of_others() -> None:
    for seed, codec in enumerate([Wangni(), Wangni(density=0.5), Wangni(rule="variance", variance=0.1)]):
        for n in (1, 9, 1000):
            samples, sent = noted(codec, skewed(seed, n) if n > 9 else noise(seed, n), seed)
            whole, rest = round(samples["whole"] * n), round((samples["density"] - samples["whole"]) * n)
            assert sent.dtype == torch.uint8 and sent.numel() == 8 + 8 * whole + 4 * rest + -(-rest // 8)
    assert whole and rest


def test_large_entries_are_sent_exactly_and_small_ones_share_one_magnitude() -> None:
    x = torch.full((1000,), 0.01)
    x[::2] *= -1
    x[[3, 500]] = torch.tensor([7.0, -9.0])
    out = once(Wangni(density=0.05), x, Memory(2))
    assert float(out[3]) == 7.0 and float(out[500]) == -9.0
    rest = torch.cat([out[:3], out[4:500], out[501:]])
    survivors = rest[rest != 0]
    assert len(survivors.abs().unique()) == 1 and 20 < len(survivors) < 90
    assert torch.equal(out.sign()[out != 0], x.double().sign()[out != 0])


def test_a_density_above_the_nonzero_entries_sends_all_exactly() -> None:
    x = skewed(1, 1000)
    torch.testing.assert_close(once(Wangni(density=1.0), x, Memory()), x.double())
    few = torch.zeros(1000)
    few[[1, 2]] = torch.tensor([3.0, -4.0])
    torch.testing.assert_close(once(Wangni(density=0.05), few, Memory()), few.double())


def test_ranks_draw_independently_and_leave_torchs_global_generator_unchanged() -> None:
    before = torch.get_rng_state()
    out = exchange(Wangni(density=0.05), torch.ones(2, 4000), placed((4000,)), [Memory(1), Memory(2)])
    assert 0 < int((out == 20).sum()) and 2 * int((out > 20).sum()) < int((out == 20).sum())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_passed_on_and_affects_no_other_entry(bad: float) -> None:
    x = noise(4, 1000)
    x[17] = bad
    out = once(Wangni(density=0.1), x, Memory())
    assert not out[17].isfinite() and int(out.isfinite().sum()) == 999
    assert 40 < int(out.count_nonzero()) < 200


def test_live_changes_of_its_knobs_take_effect_in_the_next_step() -> None:
    changes = [Change(4, "compressor.density", 0.5), Change(8, "rule", "variance"), Change(12, "variance", 50.0)]
    sessions = run(experiment(2, 16, compressor=Wangni()), *changes)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    sizes = [b.data.numel() for b in sessions[0].layout.buckets]

    def kept(step: int) -> float:
        shares = [v for s, what, _, v in sessions[0].record.samples if what == "density" and s == step]
        return sum(share * n for share, n in zip(shares, sizes, strict=True)) / sum(sizes)

    assert kept(3) == pytest.approx(0.05, abs=0.02) and kept(4) == pytest.approx(0.5, abs=0.06)
    assert kept(8) != kept(7) and kept(12) < kept(11) / 2


def test_engine_and_simulator_draw_and_send_the_same() -> None:
    e = experiment(3, 5, compressor=Wangni())
    session = run(e)[0]
    simulated = simulate(e.set("pace", 10), real=True)
    mine = simulated.spans[(simulated.spans["rank"] == 0) & (simulated.spans.lane == "comm")]
    assert [n for _, _, n in session.record.comm()] == mine.sort_values("t0", kind="stable").nbytes.tolist()
    losses = simulated.samples[(simulated.samples["rank"] == 0) & (simulated.samples.name == "loss")].value.tolist()
    assert session.record.losses() == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(("path", "value"), [("rule", "best"), ("density", 0), ("density", 2), ("variance", 0)])
def test_invalid_knob_values_are_refused_with_the_valid_ones(path: str, value: object) -> None:
    with pytest.raises(KnobError, match=rf"compressor.{path}=.*must be (one of density, variance|a number in \[0\.)"):
        experiment(compressor=Wangni()).set(f"compressor.{path}", value)


def test_error_feedback_around_a_noisy_setting_is_refused_with_alternatives() -> None:
    with pytest.raises(
        KnobError, match=r"of=Wangni: .* would grow under error feedback; use it without .* or use TopK with error"
    ):
        experiment(compressor=ErrorFeedback.usual()).set("of", "Wangni")
    assert experiment(compressor=ErrorFeedback.usual()).set("compressor", "Wangni").compressor == Wangni()
    experiment(compressor=ErrorFeedback(of=Wangni(rule="variance", variance=0.5)))


@pytest.mark.parametrize(("codec", "grows"), [(Wangni(), True), (Wangni(rule="variance", variance=0.5), False)])
def test_with_error_feedback_its_error_diverges_exactly_where_that_is_refused(codec: Wangni, grows: bool) -> None:
    memory = [Memory(1)]
    for step in range(150):
        x = noise(step, 1, 400)
        exchange(ErrorFeedback(of=codec), x / x.norm(), placed((400,)), memory)
    left = float(memory[0].buffers["residual"]["p0"].norm())
    assert left > 1e4 if grows else left < 10
