"""Tests ByteGrad against the written-out min-max rule, and the record."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, toy, weights
from workbench.compressors import ByteGrad, Compressor, ErrorFeedback, Float8, OneBit
from workbench.compressors._minmax import quantised, restored
from workbench.compressors._two_hop import packed, unpacked
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import Change

pytestmark = pytest.mark.ranks

CODECS = [
    ByteGrad(), ByteGrad(bits=4), ByteGrad(bits=4, block=64), ByteGrad(bits=2, stochastic=True, block=64),
    OneBit(), OneBit(scale="rms", block=64), Float8(block=0), Float8(to="e5m2", block=64, stochastic=True),
]  # fmt: skip


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reduced(compressor: Compressor, g: torch.Tensor) -> torch.Tensor:
    """(ranks, n) -> (n,) float64: every rank's result."""
    return exchange(compressor, g.clone(), placed((g.shape[1],)), [Memory() for _ in g])


def steps(x: np.ndarray, ranks: int, bits: int, block: int) -> np.ndarray:
    """(n,) -> (n,): the step between codes at every element, from the blocks' ranges alone."""
    m = math.ceil(len(x) / ranks)
    blocks = math.ceil(m / block) if block else 1
    each = math.ceil(m / blocks)
    at = np.arange(len(x)) // each
    spread = np.array([np.ptp(x[at == k]) for k in range(at[-1] + 1)]) / (2**bits - 1)
    return spread[at]


@pytest.mark.parametrize("block", [0, 64])
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("ranks", "n"), [(1, 1000), (2, 999), (3, 1000), (4, 1024), (8, 517)])
def test_each_element_is_within_half_a_step_of_each_coding(ranks: int, n: int, bits: int, block: int) -> None:
    g = noise(n, ranks, n) ** 3
    out = reduced(ByteGrad(bits=bits, block=block), g).numpy()
    first = sum(steps(x, ranks, bits, block) for x in g.double().numpy()) / 2
    exact = g.double().sum(0).numpy()
    # the second coding has the first hop's errors, so its range may grow by twice the worst of them
    second = (steps(exact, ranks, bits, block) + 2 * first.max() / (2**bits - 1)) / 2
    assert np.all(np.abs(out - exact) <= (first + second) * (1 + 1e-4))
    assert np.abs(out - exact).max() > 0.4 * first.min()


@pytest.mark.parametrize(("bits", "off"), [(8, 0.0098), (4, 0.167), (2, 0.93)])
def test_the_error_on_normal_numbers_in_blocks_of_512_matches_the_published_rule(bits: int, off: float) -> None:
    """Random rounding makes the error sqrt(2) times as large."""
    g, memories = noise(3, 4, 2048), [Memory(r) for r in range(4)]
    exact = g.double().sum(0)
    assert float((reduced(ByteGrad(bits=bits), g) - exact).norm() / exact.norm()) == pytest.approx(off, rel=0.1)
    chance = ByteGrad(bits=bits, stochastic=True)
    tries = [float((exchange(chance, g, placed((2048,)), memories) - exact).norm() / exact.norm()) for _ in range(20)]
    assert sum(tries) / 20 == pytest.approx(off * 2**0.5, rel=0.1)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_random_rounding_is_unbiased_through_both_hops(bits: int) -> None:
    draws, g = 1500, noise(1, 3, 64) ** 3  # each draw in a separate block
    memories, exact = [Memory(r) for r in range(3)], g.double().sum(0)
    codec = ByteGrad(bits=bits, block=64, stochastic=True)
    off = exchange(codec, g.repeat(1, draws), placed((64 * draws,)), memories).view(draws, 64) - exact
    spread = off.square().mean(0)
    u = draws * off.mean(0).square().sum() / spread.sum()
    freedom = spread.sum() ** 2 / spread.square().sum()
    assert abs(u - 1) < 5 * (2 / freedom) ** 0.5 + 5 / draws**0.5, (float(u), float(freedom))
    nearest = exchange(ByteGrad(bits=bits, block=64), g.repeat(1, 3), placed((192,)), memories)[:64] - exact
    assert float(nearest.square().sum()) > 10 * float(off.mean(0).square().sum()), "which the nearest is not"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_integers_that_fill_the_codes_are_added_exactly(ranks: int, bits: int, stochastic: bool) -> None:
    top = 2**bits - 1
    chunk = torch.cat([torch.tensor([0, top]), torch.randint(0, top + 1, (62,))])
    g = (chunk.repeat(ranks) - 7.0).repeat(ranks, 1)
    assert torch.equal(reduced(ByteGrad(bits=bits, stochastic=stochastic), g).float(), g.sum(0))


def test_a_large_offset_and_a_tiny_range_never_wrap() -> None:
    for seed in range(20):
        x = 1 + 1e-6 * noise(seed, 5000)
        codes, scales = quantised(x[None], 8)
        assert codes.min() == 0 and codes.max() == 255
        assert float((restored(codes, scales)[0] - x).abs().max()) <= float(scales[0, 1]) / 2 + 1.2e-7
    out = reduced(ByteGrad(), (1e6 + noise(1, 2, 500)))
    assert float((out - 2e6).abs().max()) < 10


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_equal_numbers_come_back_unchanged(codec: Compressor) -> None:
    for value in (0.0, 1.0, -3.25, 1e-30, 1e30) if isinstance(codec, ByteGrad | Float8) else (0.0, 0.5, -3.25):
        for n in (1, 2, 7, 100):
            out = reduced(codec, torch.full((3, n), value))
            torch.testing.assert_close(out, torch.full((n,), 3 * value).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_an_empty_bucket_is_not_exchanged(codec: Compressor) -> None:
    bucket = Bucket(0, torch.zeros(0), (), 0)
    with pytest.raises(StopIteration) as end:
        codec.reduce(Rank(0, 4), bucket, Memory()).send(None)
    assert end.value.value is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_value_that_is_not_finite_spoils_only_its_block(codec: Compressor, bad: float) -> None:
    g = noise(2, 2, 512)
    g[1, 5] = bad
    out = reduced(codec, g)
    spoilt = 64 if codec.block else 256
    assert bool(out[:spoilt].isnan().all()) and bool(out[spoilt:].isfinite().all())
    memories = [Memory(), Memory()]
    exchange(ErrorFeedback(of=codec), g, placed((512,)), memories)
    assert all(bool(m.buffers["residual"]["p0"].isfinite().all()) for m in memories)
    g[1, 5] = 0.0
    assert bool(exchange(ErrorFeedback(of=codec), g, placed((512,)), memories).isfinite().all())


def test_a_range_beyond_float32_and_the_smallest_numbers_are_defined() -> None:
    assert bool(reduced(ByteGrad(), torch.tensor([[3e38, -3e38, 0.0]])).isnan().all())
    tiny = torch.tensor([[1e-45, 5e-43, 3e-43, 0.0]])
    assert float((reduced(ByteGrad(), tiny) - tiny.double()).abs().max()) <= 2e-43, "no code leaves its byte"


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides_keep_shape_and_dtype(codec: Compressor, dtype: torch.dtype) -> None:
    x = noise(4, 300).to(dtype)[::3]
    bucket = Bucket(0, x, (), 0)
    child, answer = codec.reduce(Rank(0, 1), bucket, Memory()), None
    with pytest.raises(StopIteration) as end:
        while True:
            op = child.send(answer)
            assert op.args[0].dtype == torch.uint8 and op.args[0].is_contiguous()
            answer = op.args[0] if op.verb == "all_to_all" else op.args[0][None]
    own = end.value.value
    assert own.dtype == torch.promote_types(dtype, torch.float32), "error feedback subtracts it before it is rounded"
    assert bucket.data.dtype == dtype and bucket.data.shape == (100,)
    torch.testing.assert_close(own.to(dtype), bucket.data)  # on one rank the contribution is the result


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 64, 101])
def test_codes_are_packed_to_their_bits(width: int, n: int) -> None:
    codes = torch.randint(0, 2**width, (3, n), generator=torch.Generator().manual_seed(n)).to(torch.uint8)
    data = packed(codes, width)
    assert data.shape == (3, math.ceil(n * width / 8)) and data.dtype == torch.uint8
    assert torch.equal(unpacked(data, width, n), codes)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_contributions_and_residuals_add_up_to_the_sum(codec: Compressor) -> None:
    memories, g = [Memory() for _ in range(3)], noise(6, 3, 500)
    out = exchange(ErrorFeedback(of=codec), g, placed((500,)), memories)
    left = sum(m.buffers["residual"]["p0"] for m in memories)
    torch.testing.assert_close(out.float() + left, g.sum(0), rtol=1e-5, atol=1e-5)


def formula(session: object, codec: ByteGrad | OneBit) -> int:
    """Returns the bytes that one of 4 ranks sends per step: 2 hops, 3 peers, one chunk each."""
    total = 0
    for bucket in session.layout.buckets:
        m = math.ceil(bucket.nbytes // 4 / 4)
        k = math.ceil(m / codec.block) if codec.block else 1
        width, head = (codec.bits, 8) if isinstance(codec, ByteGrad) else (1, 4)
        total += 2 * 3 * (head * k + math.ceil(k * math.ceil(m / k) * width / 8))
    return total


@pytest.mark.parametrize("cls", [ByteGrad, OneBit])
def test_recorded_bytes_follow_the_formula_before_and_after_live_changes(cls: type) -> None:
    changes = [Change(3, "block", 64), Change(6, "bucket_mb", 0.02)]
    changes += [Change(5, "bits", 4)] if cls is ByteGrad else []
    session = run(experiment(4, 9, compressor=cls()), *changes)[0]
    sent = [sum(n for k, _, n in session.record.comm() if k == step) for step in range(9)]
    few = {"bits": 4} if cls is ByteGrad else {}
    assert sent[8] == formula(session, cls(block=64, **few))
    plain = run(experiment(4, 9, compressor=cls()))[0]
    assert sent[2] == formula(plain, cls()) == sum(n for k, _, n in plain.record.comm() if k == 8)
    assert sent[4] == formula(plain, cls(block=64)) > sent[2]


def test_eight_bits_send_a_quarter_and_four_an_eighth_of_dense_plus_headers() -> None:
    dense, byte, half = (
        sum(n for step, _, n in run(experiment(4, 4, **rest))[0].record.comm() if step == 3)
        for rest in ({}, {"compressor": ByteGrad()}, {"compressor": ByteGrad(bits=4)})
    )
    assert 0.25 < byte / dense < 0.26 and 0.125 < half / dense < 0.135


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_trains_like_dense_and_all_ranks_hold_the_same_bits(ranks: int) -> None:
    coarse, dense = (run(experiment(ranks, 10, **rest)) for rest in ({"compressor": ByteGrad()}, {}))
    torch.testing.assert_close(weights(coarse[0]), weights(dense[0]), rtol=0.05, atol=0.01)
    assert len({hash_model_state(s.layout) for s in coarse}) == 1
    assert not torch.equal(weights(coarse[0]), weights(dense[0]))


def test_four_bits_with_error_feedback_reach_the_loss_of_dense() -> None:
    rest = {"task": toy(partial(torch.optim.SGD, lr=0.05)), "eval_every": 100}
    held = {}
    for c in (None, ErrorFeedback(of=ByteGrad(bits=4)), OneBit.usual()):
        session = run(experiment(2, 101, **({"compressor": c} if c else {}), **rest))[0]
        held[str(c)] = [v for _, name, _, v in session.record.samples if name == "held_out"]
    assert max(h[-1] for h in held.values()) < 1.15 * min(h[-1] for h in held.values()), held
    assert all(h[-1] < 0.7 * h[0] for h in held.values())
