"""Tests gradients in fp16, bf16 and fp64: no overflow near a type's range, no loss of small values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.ranks import exchange, experiment, placed, together
from workbench.compressors import (
    ALQ,
    AMQ,
    DGC,
    QSGD,
    Compressor,
    GTopK,
    OkTopK,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
    Wangni,
)  # fmt: skip
from workbench.compressors._range import within
from workbench.host.elastic.resizing import bequeath_residuals
from workbench.rank import Bucket, Memory, Rank

pytestmark = pytest.mark.ranks
INF, NAN = float("inf"), float("nan")


def gradients(seed: int, ranks: int, n: int) -> torch.Tensor:
    lasting = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return lasting + torch.randn(ranks, n, generator=torch.Generator().manual_seed(seed + 1))


@pytest.mark.parametrize("of", [
    ALQ(), AMQ(), QSGD(norm="l2", bits=2, exchange="two_hop"), Wangni(), Wangni(density=0.001),
    DGC(density=0.01), DGC(density=0.01, momentum=0.0), GTopK.usual(), OkTopK.usual(), TopK.usual(),
], ids=str)  # fmt: skip
def test_a_compressed_sum_is_finite_in_fp16_if_the_dense_sum_is(of: Compressor) -> None:
    memories, n = [Memory(r) for r in range(4)], 8192
    for step in range(8):
        g = gradients(step, 4, n)
        g = (g * (15_000 / g.abs().max())).half()
        assert bool(g.sum(0).isfinite().all())
        assert bool(exchange(of, g, placed((n,)), memories).isfinite().all()), step


@pytest.mark.parametrize("of", [SignSGD(), TernGrad(), TernGrad(one_scale=False)], ids=str)
def test_a_result_beyond_fp16_is_clamped_if_the_dense_sum_is_finite(of: Compressor) -> None:
    g = torch.full((4, 1024), 20_000.0)
    if isinstance(of, SignSGD):
        g[0] = -g[0]
    else:
        g[:, 1:] /= 2  # some sums of draws are 4 times 20,000
        g[0, 0] = -g[0, 0]
    assert bool(g.half().sum(0).isfinite().all())
    assert bool(exchange(of, g.half(), placed((1024,)), [Memory(r) for r in range(4)]).isfinite().all())


def test_ok_topk_adds_up_narrow_numbers_in_fp32_and_rounds_once() -> None:
    g = torch.ones(8, 16).bfloat16()
    g[0] = 256.0  # 256 + 1 is 256 in bf16
    out = exchange(OkTopK(density=1.0), g, placed((16,)), [Memory(r) for r in range(8)])
    assert out.tolist() == [float(torch.tensor(263.0).bfloat16())] * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sign_sgd_keeps_its_moving_average_of_narrow_gradients_in_fp32(dtype: torch.dtype) -> None:
    memory, average = Memory(), torch.zeros(500, dtype=torch.float64)
    for step in range(200):
        g = gradients(step, 1, 500).to(dtype)
        average = 0.99 * average + 0.01 * g[0].double()
        exchange(SignSGD(momentum=0.99), g, placed((500,)), [memory])
    assert float((memory.buffers["sign_sgd"]["p0"] - average).norm() / average.norm()) < 1e-5


def test_a_rank_that_leaves_hands_on_its_residual_in_fp32() -> None:
    """The residual holds numbers beyond the range of fp16, and others too small for bf16 to add."""
    memories, parts = [Memory(), Memory()], tuple(placed((4,)))
    e = experiment(2, 2, compressor=TopK.usual())
    for memory, value in zip(memories, (1.0, 1e5 + 2.0**-6), strict=True):
        memory.flat("residual", Bucket(0, torch.zeros(4).half(), parts, 0), torch.float32).fill_(value)

    async def handed_on(rank: Rank) -> None:
        rank.memory = memories[rank.id]
        bucket = Bucket(0, torch.zeros(4).half(), parts, 0)

        async def gather(n: int) -> list[int]:
            return [n] * rank.size

        await bequeath_residuals(SimpleNamespace(rank=rank, experiment=e, gather=gather,
                                       layout=SimpleNamespace(list_params=lambda: [bucket])), (0,))  # fmt: skip

    together([handed_on(Rank(r, 2)) for r in range(2)])
    assert memories[0].buffers["residual"]["p0"].tolist() == [1e5 + 1 + 2.0**-6] * 4


def test_conversion_to_a_narrow_type_keeps_finite_values_finite() -> None:
    x = torch.tensor([1e9, -1e9, 3.0, INF, -INF, NAN])
    out = within(x, torch.float16)
    assert out.dtype == torch.float16 and out[:5].tolist() == [65504.0, -65504.0, 3.0, INF, -INF] and out[5].isnan()
    assert within(x, torch.float32) is x and within(x, torch.float64).dtype == torch.float64


@pytest.mark.parametrize(("momentum", "dtype"), [(0.9, torch.bfloat16), (0.0, torch.bfloat16), (0.9, torch.float16)])
def test_dgc_loses_nothing_of_narrow_gradients(momentum: float, dtype: torch.dtype) -> None:
    """The sum of all sent values and the remainder equals the sum of the momenta, over 300 steps."""
    memory, n, of = Memory(), 2000, DGC(density=0.001, momentum=momentum, masking=False)
    sent = owed = u = torch.zeros(n, dtype=torch.float64)
    for step in range(300):
        g = gradients(step, 1, n).to(dtype)
        u = momentum * u + g[0].double()
        owed = owed + u
        sent = sent + exchange(of, g, placed((n,)), [memory])
    left = memory.buffers["velocity"]["p0"]
    assert left.dtype == torch.float32
    assert float((sent + left - owed).norm() / owed.norm()) < 1e-5


def test_dgc_keeps_values_beyond_the_range_of_fp16_for_later() -> None:
    memory, n, of = Memory(), 4, DGC(density=1.0, momentum=0.9, masking=False)
    g = torch.full((1, n), 20_000.0).half()
    out = [exchange(of, g, placed((n,)), [memory]) for _ in range(5)]
    u = [20_000 * (1 - 0.9**k) / 0.1 for k in range(1, 6)]
    assert max(float(x.max()) for x in out) == 65504.0
    left = memory.buffers["velocity"]["p0"]
    assert (sum(out) + left.double()).tolist() == pytest.approx([sum(u)] * n, rel=1e-4)


@pytest.mark.parametrize("of", [Wangni(), Wangni(rule="variance", variance=0.5)], ids=str)
def test_wangni_works_in_float64_and_keeps_the_mean(of: Wangni) -> None:
    x = gradients(1, 2, 3000).double() ** 3
    parts, memories = placed((3000,)), [Memory(0), Memory(1)]
    many = torch.stack([exchange(of, x, parts, memories) for _ in range(400)])
    size = x.abs()
    variance = sum(row * (of.scale_of(row) - row).clamp(min=0) for row in size)  # of x_i / p_i with probability p_i
    off = (many.mean(0) - x.sum(0)).abs()
    assert float((off > 4.5 * (variance / 400).sqrt() + 1e-9).double().mean()) < 0.005
    assert float((many - x.sum(0)).square().mean(0).sum() / variance.sum()) == pytest.approx(1, abs=0.05)
    whole = exchange(Wangni(density=1.0), x, parts, memories)
    torch.testing.assert_close(whole, x.sum(0), rtol=1e-12, atol=1e-9)  # u itself is sent in float32


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_random_k_passes_on_non_finite_values_that_it_did_not_draw(bad: float) -> None:
    n, parts = 1000, placed((1000,))
    for place in range(0, n, 97):
        g = torch.ones(2, n)
        g[1, place] = bad
        out = exchange(RandomK(density=0.01), g, parts, [Memory(0), Memory(1)])
        assert int(out.isnan().sum()) == 10
    large = exchange(RandomK(density=0.01), torch.full((2, n), 1e38), parts, [Memory(0), Memory(1)])
    assert bool(large.isfinite().all()), "all of it together would be infinite"
