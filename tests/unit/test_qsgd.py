"""Compares QSGD, and the exchange and rounding that it shares with other level codecs, with rules in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, weights
from tests.unbiased import assert_unbiased
from tests.unit.draws import drawn, heavy, noise, reduced
from workbench import simulate
from workbench.compressors import NUQSGD, QSGD, ErrorFeedback
from workbench.compressors._levels import between, norms
from workbench.compressors._stochastic import dithered
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import Change, KnobError

pytestmark = pytest.mark.ranks

BOTH = pytest.mark.parametrize("hops", ["gather", "two_hop"])


def test_each_element_is_rounded_to_one_of_its_two_neighbouring_levels() -> None:
    for norm, bits in (("max", 4), ("l2", 3), ("l2", 8), ("max", 2)):
        x, s = heavy(1, 4096), 2 ** (bits - 1) - 1
        size = {"max": np.abs(x.numpy()).max(), "l2": np.linalg.norm(x.double().numpy())}[norm]
        xi = reduced(QSGD(bits=bits, block=4096, norm=norm), x[None]).numpy() * s / size
        np.testing.assert_allclose(xi, np.round(xi), atol=1e-4)
        exact = x.double().numpy() * s / size
        assert np.all((np.round(xi) >= np.floor(exact - 1e-5)) & (np.round(xi) <= np.ceil(exact + 1e-5)))
        assert 0.002 < np.mean(np.round(xi) != np.round(exact)) < 0.6, "by chance, not to the nearest"


EVERY = [QSGD(bits=2), QSGD(), QSGD(norm="l2"), QSGD(bits=8), NUQSGD(), NUQSGD(grid="code")]


@BOTH
@pytest.mark.parametrize("of", EVERY, ids=str)
def test_the_mean_is_kept_through_the_exchange(of: Any, hops: str) -> None:
    """Uses the statistic of the law on unbiased compressors, for three ranks and both ways to exchange."""
    x = torch.stack([heavy(seed, 256) for seed in (1, 3, 5)])
    for seed in (1, 20):
        got = drawn(type(of)(**{**vars(of), "block": 256, "exchange": hops}), x, 1500, seed)
        assert_unbiased(got - x.double().sum(0))


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_the_variance_matches_the_rule_and_the_papers_bound(bits: int) -> None:
    n, draws, s = 4096, 200, 2 ** (bits - 1) - 1
    x = heavy(7, n).double()
    got = drawn(QSGD(bits=bits, block=n, norm="l2"), x.float()[None], draws)
    at = (s * x.abs() / x.norm()).frac()
    exact = float((at * (1 - at)).sum()) / s**2
    each = (got - x).square().sum(1) / x.square().sum()
    assert abs(float(each.mean()) - exact) < 5 * float(each.std()) / draws**0.5
    assert exact <= min(n / s**2, n**0.5 / s)
    assert float((got != 0).sum(1).double().mean()) <= s * (s + n**0.5)


def test_codes_of_two_gathered_sums_are_added_without_a_second_rounding() -> None:
    """If all elements are on levels, the gathered sum is exact; two hops round the sum again."""
    s = 2**3 - 1
    rng = torch.Generator().manual_seed(1)
    g = torch.randint(-s, s + 1, (3, 512), generator=rng).float()
    g[:, 0] = s
    assert torch.equal(reduced(QSGD(), g).float(), g.sum(0))
    assert not torch.equal(reduced(QSGD(exchange="two_hop"), g).float(), g.sum(0))


@BOTH
@pytest.mark.parametrize("of", [QSGD(), NUQSGD()], ids=str)
def test_the_ranks_contributions_sum_to_the_result(of: Any, hops: str) -> None:
    memories, g = [Memory(r) for r in range(3)], noise(6, 3, 1500)
    out = exchange(ErrorFeedback(of=type(of)(exchange=hops)), g, placed((1500,)), memories)
    left = sum(m.buffers["residual"]["p0"] for m in memories)
    torch.testing.assert_close(out.float() + left, g.sum(0), rtol=1e-5, atol=1e-5)


@BOTH
def test_zeros_stay_zero_alone_and_among_other_values(hops: str) -> None:
    g = noise(1, 2, 2048)
    g[:, 512:1024] = 0.0
    g[:, ::5] = 0.0
    for of in (QSGD(exchange=hops), QSGD(exchange=hops, norm="l2"), NUQSGD(exchange=hops)):
        out = reduced(of, g)
        assert bool(out.isfinite().all()) and not out[512:1024].any() and not out[::5].any()
        assert out.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@BOTH
def test_a_non_finite_value_affects_only_its_block(hops: str, bad: float) -> None:
    for of in (QSGD(exchange=hops, bits=3), NUQSGD(exchange=hops), QSGD(exchange=hops, norm="l2")):
        g = noise(2, 2, 2048)
        g[1, 600] = bad
        memories = [Memory(0), Memory(1)]
        out = exchange(of, g, placed((2048,)), memories)
        assert bool(out[512:1024].isnan().all())
        assert bool(out[:512].isfinite().all()) and bool(out[1024:].isfinite().all())
        g[1, 600] = 0.0
        assert bool(exchange(of, g, placed((2048,)), memories).isfinite().all())


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-12, 1e12, 1e30, 1e36])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_the_result_scales_with_the_gradients(scale: float, norm: str) -> None:
    g = noise(3, 2, 300)
    for of in (QSGD(norm=norm), NUQSGD(norm=norm)):
        out = reduced(of, (g.double() * scale).float()) / scale
        torch.testing.assert_close(out, reduced(of, g), rtol=1e-4, atol=1e-6)


def test_the_smallest_numbers_give_finite_results() -> None:
    tiny = torch.tensor([[1e-45, 5e-43, -3e-43, 0.0]])
    for of in (QSGD(), QSGD(norm="l2"), NUQSGD()):
        out = reduced(of, tiny)
        assert bool(out.isfinite().all()) and float(out.abs().max()) < 2e-42


def test_norms_equal_numpys() -> None:
    x = noise(4, 3, 5, 77) ** 3
    np.testing.assert_allclose(norms(x, "l2")[..., 0].numpy(), np.linalg.norm(x.numpy(), axis=-1), rtol=1e-6)
    np.testing.assert_allclose(norms(x, "max")[..., 0].numpy(), np.abs(x.numpy()).max(-1), rtol=0)


def test_random_rounding_keeps_whole_numbers() -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(256.0).repeat(4000)
    assert torch.equal(dithered(y, rng), y.to(torch.uint8))
    half = dithered(torch.full((100_000,), 254.25), rng)
    assert set(half.tolist()) == {254, 255}
    assert abs(float((half == 255).float().mean()) - 0.25) < 5 * (0.25 * 0.75 / 100_000) ** 0.5


def test_the_position_between_levels_is_interpolated_linearly() -> None:
    levels = torch.tensor([-1.0, -0.3, 0.0, 0.01, 1.0])
    r = torch.cat([torch.linspace(-1, 1, 1001), levels])
    want = np.interp(r.double().numpy(), levels.double().numpy(), np.arange(5.0))
    np.testing.assert_allclose(between(r.clone(), levels).numpy(), want, atol=2e-6)
    assert between(levels.clone(), levels).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides_keep_shape_and_dtype(dtype: torch.dtype, hops: str) -> None:
    x = noise(4, 300).to(dtype)[::3]
    bucket = Bucket(0, x, (), 0)
    child, answer = QSGD(exchange=hops).reduce(Rank(0, 1), bucket, Memory()), None
    with pytest.raises(StopIteration) as end:
        while True:
            op = child.send(answer)
            assert op.args[0].dtype == torch.uint8 and op.args[0].is_contiguous()
            answer = op.args[0] if op.verb == "all_to_all" else op.args[0][None]
    assert bucket.data.dtype == end.value.value.dtype == dtype and bucket.data.shape == (100,)
    torch.testing.assert_close(end.value.value, bucket.data)


@BOTH
def test_an_empty_bucket_is_not_exchanged(hops: str) -> None:
    with pytest.raises(StopIteration) as end:
        QSGD(exchange=hops).reduce(Rank(0, 4), Bucket(0, torch.zeros(0), (), 0), Memory()).send(None)
    assert end.value.value is None


def test_each_rank_draws_its_own_random_numbers() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    same = noise(1, 1, 4096).repeat(2, 1)
    memories = [Memory(0), Memory(1)]
    exchange(ErrorFeedback(of=QSGD()), same, placed((4096,)), memories)
    assert not torch.equal(memories[0].buffers["residual"]["p0"], memories[1].buffers["residual"]["p0"])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(reduced(QSGD(), same, 3), reduced(QSGD(), same, 3)), "a run can be repeated"
    assert not torch.equal(reduced(QSGD(), same, 3), reduced(QSGD(), same, 4))


def formula(session: object, of: QSGD) -> int:
    """Returns the bytes that one of four ranks sends per step."""
    total = 0
    for bucket in session.layout.buckets:
        n = bucket.nbytes // 4
        m = n if of.exchange == "gather" else math.ceil(n / 4)
        k = math.ceil(m / of.block)
        hops = 1 if of.exchange == "gather" else 2
        total += hops * 3 * (4 * k + math.ceil(k * math.ceil(m / k) * of.bits / 8))
    return total


def test_recorded_bytes_equal_the_formula_through_live_changes() -> None:
    turned = {2: ("bits", 3), 4: ("block", 64), 6: ("exchange", "two_hop"), 8: ("bits", 7)}
    session = run(experiment(4, 10, compressor=QSGD()), *[Change(at, name, to) for at, (name, to) in turned.items()])[0]
    now: dict[str, Any] = {}
    sent = [sum(n for k, _, n in session.record.comm() if k == step) for step in range(10)]
    for step in range(1, 10):
        now |= dict([turned[step]]) if step in turned else {}
        assert sent[step] == formula(session, QSGD(**now)), (step, now)


@BOTH
def test_a_simulation_of_sizes_sends_the_same_bytes(hops: str) -> None:
    e = experiment(4, 6, compressor=QSGD(exchange=hops, bits=3), pace=10)
    spans = simulate(e, changes=[Change(3, "bits", 5)], real=False).spans
    session = run(e, Change(3, "bits", 5))[0]
    for step in range(1, 6):
        mine = spans[(spans["rank"] == 0) & (spans.step == step)]
        assert int(mine.nbytes.sum()) == sum(n for k, _, n in session.record.comm() if k == step)


@BOTH
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_8_bits_train_like_dense_and_all_ranks_agree(ranks: int, hops: str) -> None:
    coarse = run(experiment(ranks, 10, compressor=QSGD(bits=8, exchange=hops)))
    dense = run(experiment(ranks, 10))
    torch.testing.assert_close(weights(coarse[0]), weights(dense[0]), rtol=0.05, atol=0.01)
    assert len({hash_model_state(s.layout) for s in coarse}) == 1
    assert not torch.equal(weights(coarse[0]), weights(dense[0]))


@pytest.mark.parametrize(
    ("knob", "value", "allowed"),
    [
        ("bits", 9, r"an integer in \[2, 8\]"),
        ("bits", 1, r"an integer in \[2, 8\]"),
        ("block", 4, r"an integer in \[8, 1.04858e\+06\]"),
        ("norm", "l1", "one of max, l2"),
        ("exchange", "ring", "one of gather, two_hop"),
    ],
)
def test_an_invalid_setting_raises_knob_error_with_the_allowed_values(knob: str, value: object, allowed: str) -> None:
    with pytest.raises(KnobError, match=f"compressor.{knob}=.*: must be {allowed}"):
        experiment(compressor=QSGD()).set(f"compressor.{knob}", value)
