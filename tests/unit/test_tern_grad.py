"""Compares TernGrad with its variance, with exact sums of whole numbers, and with the record."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, together, toy
from workbench import simulate
from workbench.compressors import TernGrad
from workbench.compressors.tern_grad import field
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Op, Part, Rank
from workbench.settings import Change

pytestmark = pytest.mark.ranks

both = pytest.mark.parametrize("shared", [True, False])


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def contributions(codec: TernGrad, g: torch.Tensor, parts: list[Part]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns each rank's reported contribution, and the result."""
    buckets = [Bucket(0, row.clone(), tuple(parts), 0) for row in g]
    made = [codec.reduce(Rank(r, len(g)), b, Memory(r)) for r, b in enumerate(buckets)]
    return together(made), buckets[0].data


@pytest.mark.parametrize("seed", [1, 2])
def test_its_variance_is_the_largest_times_the_sum_minus_the_squares(seed: int) -> None:
    draws, memory = 600, [Memory(seed)]
    x = noise(seed, 1, 4096) ** 3
    off = [float((exchange(TernGrad(), x, placed((4096,)), memory) - x[0]).square().sum()) for _ in range(draws)]
    want = float(x.abs().max() * x.abs().sum() - x.square().sum())
    # the squared error is a sum of independent terms, each |x| (s - |x|) on average and at most s^2
    spread = math.sqrt(float(x.abs().max() ** 3 * x.abs().sum()) / draws)
    assert abs(sum(off) / draws - want) < 5 * spread and spread < 0.02 * want


@both
def test_over_several_ranks_the_mean_is_the_sum(shared: bool) -> None:
    draws, ranks = 1500, 3  # each in its own layer
    g = noise(4, ranks, 128) ** 3 * torch.tensor([[1.0], [0.1], [3.0]])
    memories = [Memory(r) for r in range(ranks)]
    out = exchange(TernGrad(one_scale=shared), g.repeat(1, draws), placed(*[(128,)] * draws), memories)
    off = out.view(draws, 128) - g.double().sum(0)
    spread = off.square().mean(0)
    u = draws * off.mean(0).square().sum() / spread.sum()
    freedom = spread.sum() ** 2 / spread.square().sum()
    assert abs(u - 1) < 5 * (2 / freedom) ** 0.5 + 5 / draws**0.5, (float(u), float(freedom))


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        (1, True),
        (2, True),
        (3, True),
        (7, True),
        (8, True),
        (127, True),
        (128, True),
        (1, False),
        (3, False),
        (8, False),
    ],
)
def test_ternary_values_are_summed_exactly_by_any_number_of_ranks(ranks: int, shared: bool) -> None:
    """No carry reaches a neighbour's field, even if all ranks send the same value."""
    g = torch.tensor([2.0, -2.0, 0.0]).repeat(11)[:31].repeat(ranks, 1)
    g[0, 4:9] = torch.tensor([0.0, 2.0, 2.0, -2.0, 0.0])
    out = exchange(TernGrad(one_scale=shared), g, placed((31,)), [Memory(r) for r in range(ranks)])
    assert torch.equal(out.float(), g.sum(0))


def test_a_field_has_room_for_the_sum_of_all_ranks() -> None:
    assert [field(p) for p in (1, 2, 7, 8, 127, 128, 4096)] == [2, 4, 4, 8, 8, 16, 16]
    assert all(2 * p < 2 ** field(p) for p in range(1, 4097))


def test_a_shared_scale_is_the_largest_of_all_ranks_and_draws_are_whole_multiples() -> None:
    g = noise(5, 4, 300) * torch.tensor([[1.0], [2.0], [0.5], [1.0]])
    own, out = contributions(TernGrad(), g, placed((100,), (20, 10)))
    for a, b in ((0, 100), (100, 300)):
        largest = g[:, a:b].abs().max()
        counts = out[a:b] / largest
        torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-5)
        for row, x in zip(own, g, strict=True):
            drawn = row[a:b] / largest
            assert set(drawn.tolist()) <= {-1.0, 0.0, 1.0} and bool((drawn * x[a:b] >= 0).all())
    torch.testing.assert_close(sum(own), out)


def test_separate_scales_are_less_noisy() -> None:
    g = noise(5, 4, 4000)
    g[1, 0] = 30.0
    exact = g.double().sum(0)
    off = {}
    for shared in (True, False):
        out = exchange(TernGrad(one_scale=shared), g, placed((4000,)), [Memory(r) for r in range(4)])
        off[shared] = float((out - exact).norm())
    assert off[False] < 0.7 * off[True]


@both
def test_every_layer_has_its_own_scale(shared: bool) -> None:
    g = noise(6, 2, 200)
    g[:, 100:] *= 1e-4
    out = exchange(TernGrad(one_scale=shared), g, placed((10, 10), (100,)), [Memory(0), Memory(1)])
    assert float(out[100:].abs().max()) <= 2.0001 * float(g[:, 100:].abs().max()) and bool(out[100:].any())


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_affects_only_its_layer(shared: bool, bad: float) -> None:
    g = noise(7, 3, 90)
    for r in range(3):
        spoilt = g.clone()
        spoilt[r, 5] = bad
        out = exchange(TernGrad(one_scale=shared), spoilt, placed((30,), (60,)), [Memory(0), Memory(1), Memory(2)])
        assert bool(out[:30].isnan().all()) and bool(out[30:].isfinite().all())


def test_clipping_limits_values_to_a_multiple_of_the_rms() -> None:
    x = noise(8, 1, 1000)
    x[0, 3] = 100.0
    rms = float(x.square().mean().sqrt())
    out = exchange(TernGrad(clip_rms=2.5), x, placed((1000,)), [Memory()])
    assert float(out.abs().max()) == pytest.approx(2.5 * rms, rel=1e-5)
    plain = exchange(TernGrad(), x, placed((1000,)), [Memory()])
    assert float(plain.abs().max()) == 100
    assert float((out - x[0]).norm()) < 0.5 * float((plain - x[0]).norm())
    equal = torch.full((1, 64), -3.0)
    assert torch.equal(exchange(TernGrad(clip_rms=1.0), equal, placed((64,)), [Memory()]).float(), equal[0])
    one = torch.tensor([[0.25]])
    assert torch.equal(exchange(TernGrad(clip_rms=2.5), one, placed((1,)), [Memory()]).float(), one[0])


def test_only_clipping_is_biased() -> None:
    x = torch.tensor([[1.0] * 15 + [10.0]])
    memory, limit = [Memory(1)], 2 * math.sqrt((15 + 100) / 16)
    plain, cut = (
        sum(exchange(TernGrad(clip_rms=c), x, placed((16,)), memory) for _ in range(800)) / 800 for c in (0.0, 2.0)
    )
    assert float(plain[15]) == 10 and float(cut[15]) == pytest.approx(limit, rel=1e-5)
    assert float(cut[:15].mean()) == pytest.approx(1.0, abs=5 * math.sqrt(limit / 15 / 800))


def sizes(codec: TernGrad, ranks: int, n: int, layers: int) -> list[tuple[str, torch.dtype, int]]:
    """Returns rank 0's operations: verb, dtype and input bytes."""
    seen: list[Op] = []
    parts = tuple(placed(*[(n // layers,)] * layers))
    buckets = [Bucket(0, noise(r, n), parts, 0) for r in range(ranks)]
    together([codec.reduce(Rank(r, ranks), b, Memory(r)) for r, b in enumerate(buckets)], seen)
    return [(op.verb, op.args[0].dtype, op.args[0].numel() * op.args[0].element_size()) for op in seen]


def test_draws_are_sent_in_as_many_bits_as_their_sum_needs() -> None:
    head, u8 = ("all_reduce", torch.float32, 12), torch.uint8
    assert sizes(TernGrad(), 7, 300, 3) == [head, ("all_reduce", u8, 150)]
    assert sizes(TernGrad(), 8, 300, 3) == [head, ("all_reduce", u8, 300)]
    assert sizes(TernGrad(), 128, 300, 3) == [head, ("all_reduce", torch.int32, 600)]
    assert sizes(TernGrad(one_scale=False), 8, 300, 3) == [("all_gather", u8, 12 + 75)]


def formula(session: Any, shared: bool) -> int:
    """Returns the bytes that one of four ranks sends per step."""
    total = 0
    for bucket in session.layout.buckets:
        n, layers = bucket.data.numel(), len(bucket.parts)
        if shared:
            total += traffic("all_reduce", 4 * layers, 4)[0] + traffic("all_reduce", math.ceil(n / 2), 4)[0]
        else:
            total += 3 * (math.ceil(n / 4) + 4 * layers)
    return total


@both
def test_recorded_bytes_equal_the_formula_before_and_after_a_live_change(shared: bool) -> None:
    changes = [Change(4, "one_scale", not shared), Change(6, "bucket_mb", 0.02), Change(7, "clip_rms", 2.5)]
    sessions = run(experiment(4, 9, compressor=TernGrad(one_scale=shared)), *changes)
    sent = [sum(n for k, _, n in sessions[0].record.comm() if k == step) for step in range(9)]
    plain = run(experiment(4, 4, compressor=TernGrad(one_scale=shared)))[0]
    assert sent[3] == formula(plain, shared) and sent[5] == formula(plain, not shared)
    assert sent[8] == formula(sessions[0], not shared)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_an_empty_bucket_is_not_exchanged() -> None:
    with pytest.raises(StopIteration) as end:
        TernGrad().reduce(Rank(0, 4), Bucket(0, torch.zeros(0), (), 0), Memory()).send(None)
    assert end.value.value is None


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_buckets_keep_their_dtype(shared: bool, dtype: torch.dtype) -> None:
    own, out = contributions(TernGrad(one_scale=shared), noise(9, 2, 100).to(dtype), placed((100,)))
    assert out.dtype == dtype and all(row.dtype == dtype for row in own) and bool(out.any())


@both
def test_it_trains(shared: bool) -> None:
    rest = {"task": toy(partial(torch.optim.SGD, lr=0.02)), "eval_every": 100}
    session = run(experiment(2, 101, compressor=TernGrad(one_scale=shared, clip_rms=2.5), **rest))[0]
    held = [v for _, name, _, v in session.record.samples if name == "held_out"]
    assert held[-1] < 0.8 * held[0], held


@both
def test_the_same_seed_draws_the_same_on_engine_and_simulator(shared: bool) -> None:
    e = experiment(3, 6, compressor=TernGrad(one_scale=shared))
    first, again = (run(e)[0] for _ in range(2))
    assert hash_model_state(first.layout) == hash_model_state(again.layout)
    samples = simulate(e.set("pace", 10), real=True).samples
    losses = samples[(samples["rank"] == 0) & (samples.name == "loss")].value.tolist()
    assert first.record.losses() == pytest.approx(losses, rel=1e-5)


def test_a_nan_is_noticed_even_if_the_max_collective_drops_it() -> None:
    """A maximum may be computed by comparisons, and a NaN is not larger than any number; infinity is."""
    x = noise(1, 2, 64)
    x[0, 3] = math.nan
    buckets = [Bucket(0, row.clone(), tuple(placed((64,))), 0) for row in x]
    made = [TernGrad().reduce(Rank(r, 2), b, Memory(r)) for r, b in enumerate(buckets)]
    ops = [one.send(None) for one in made]
    assert [op.args[1] for op in ops] == ["max", "max"]
    scales = torch.fmax(ops[0].args[0], ops[1].args[0])
    summed = [one.send(scales.clone()) for one in made]
    total = summed[0].args[0] + summed[1].args[0]
    for one in made:
        with pytest.raises(StopIteration):
            one.send(total.clone())
    assert all(bool(b.data.isnan().all()) for b in buckets)
