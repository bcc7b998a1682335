"""Tests error feedback: a wide residual under narrow gradients, and non-finite steps."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import exchange, placed, together
from workbench.compressors import (
    ACPSGD,
    DGC,
    QSGD,
    Compressor,
    Dense,
    EFSignSGD,
    ErrorFeedback,
    GTopK,
    Layers,
    OkTopK,
    OneBit,
    PowerSGD,
    ScaleCom,
    SIDCo,
    TopK,
)  # fmt: skip
from workbench.compressors.error_feedback import wide
from workbench.rank import Bucket, Memory, Rank

NARROW = [torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


def gradients(seed: int, n: int, ranks: int = 1) -> torch.Tensor:
    """Returns gradients like those of training: a constant direction for each element, plus noise. (ranks, n)"""
    lasting = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return lasting + torch.randn(ranks, n, generator=torch.Generator().manual_seed(seed + 1))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("of", [TopK(density=0.002), OneBit(), PowerSGD(rank=1), ACPSGD(rank=1),
                                ScaleCom(density=0.002)], ids=str)  # fmt: skip
def test_narrow_gradients_lose_nothing(of: Compressor, dtype: torch.dtype) -> None:
    """One rank, so no sum between ranks rounds: outputs plus residual equal the inputs."""
    parts, memory, n = placed((40, 30), (12, 50)), Memory(), 1800
    sent = owed = torch.zeros(n, dtype=torch.float64)
    for step in range(300):
        g = gradients(step, n).to(dtype)
        owed = owed + g[0].double()
        sent = sent + exchange(ErrorFeedback(of=of), g, parts, [memory])
    left = torch.cat([memory.buffers["residual"][p.name] for p in parts])
    assert left.dtype == torch.float32
    assert (sent + left - owed).norm() < 1e-5 * owed.norm()


@pytest.mark.parametrize("of", [TopK(density=0.1), SIDCo(density=0.1), GTopK(density=0.1), OkTopK(density=0.1), QSGD(),
                                EFSignSGD(), OneBit(), Layers(of=TopK(density=0.1), rest=QSGD(), smallest=100),
                                DGC(density=0.1, momentum=0.0)], ids=str)  # fmt: skip
def test_what_a_narrow_sum_cannot_hold_stays_in_the_residuals(of: Compressor) -> None:
    """The sum of 6 ranks rounds in bf16, and exceeds the range of fp16: outputs plus residuals equal the inputs."""
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, 25_000.0)):
        parts, memories = placed((4, 15), (12, 15)), [Memory(r) for r in range(6)]
        sent = owed = torch.zeros(240, dtype=torch.float64)
        for step in range(12):
            g = gradients(step, 240, 6).clamp(-2, 2) if step < 3 or scale == 1.0 else torch.zeros(6, 240)
            owed = owed + (g := (g * scale).to(dtype)).double().sum(0)
            sent = sent + exchange(ErrorFeedback(of=of), g, parts, memories)
        kept = "velocity" if isinstance(of, DGC) else "residual"
        left = sum(torch.cat([m.buffers[kept][p.name] for p in parts]).double() for m in memories)
        assert bool(sent.isfinite().all()) and (sent + left - owed).norm() < 1e-5 * owed.norm()


def test_a_sum_of_scale_com_that_overflows_leaves_the_residual() -> None:
    memories, parts, of = [Memory(r) for r in range(2)], placed((4,)), ScaleCom(density=0.25)
    exchange(of, torch.tensor([[8000.0, 4096.0, 0.0, 0.0]] * 2).half(), parts, memories)
    out = exchange(of, torch.tensor([[0.0, 60_000.0, 0.0, 0.0]] * 2).half(), parts, memories)
    assert out.tolist() == [0.0, INF, 0.0, 0.0]
    assert [m.buffers["residual"]["p0"].tolist() for m in memories] == [[0.0, 4096.0, 0.0, 0.0]] * 2


def lost_with_a_residual_in(kind: torch.dtype, density: float, steps: int) -> float:
    """Runs top-k with error feedback on bf16 gradients. Returns the relative part neither sent nor left."""
    n = 2000
    residual, k = torch.zeros(n, dtype=kind), max(1, round(density * n))
    sent = owed = torch.zeros(n, dtype=torch.float64)
    for step in range(steps):
        g = gradients(step, n)[0].bfloat16()
        owed = owed + g.double()
        x = (residual.float() + g.float()).to(kind)
        out = torch.zeros(n)
        index = x.abs().topk(k).indices
        out[index] = x[index].bfloat16().float()
        residual = (x.float() - out).to(kind)
        sent = sent + out.double()
    return float((sent + residual.double() - owed).norm() / owed.norm())


def test_a_residual_in_bf16_would_lose_small_gradients() -> None:
    """Shows why the residual is fp32: bf16 loses 0.4 % of all gradients at density 0.01, and 4 % at 0.001."""
    for density, steps, lost in ((0.01, 300, 0.002), (0.001, 1000, 0.02)):
        assert lost_with_a_residual_in(torch.bfloat16, density, steps) > lost
        assert lost_with_a_residual_in(torch.float32, density, steps) < 1e-6


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_residual_of_narrow_gradients_stays_wide_in_new_buckets(dtype: torch.dtype) -> None:
    parts, memory, of = placed((30,), (50,)), Memory(), ErrorFeedback(of=TopK(density=0.1))
    exchange(of, gradients(0, 80).to(dtype), parts, [memory])
    before = torch.cat([memory.buffers["residual"][p.name] for p in parts])
    for group in (parts[:1], parts[1:]):
        exchange(ErrorFeedback(of=TopK(density=0.0001)), torch.zeros(1, 80, dtype=dtype), group, [memory])
    after = torch.cat([memory.buffers["residual"][p.name] for p in parts])
    assert after.dtype == wide(dtype) == torch.float32 and float((after - before).abs().max()) > 0
    assert int((after != before).sum()) == 2, "of each bucket one element was sent"
    assert wide(torch.float64) == torch.float64


def test_values_beyond_fp16_wait_in_the_residual() -> None:
    memory, parts, of = Memory(), placed((4,)), ErrorFeedback(of=TopK(density=0.25))
    g = torch.tensor([[60000.0, 50000.0, 1.0, 0.0]], dtype=torch.float16)
    outs = [exchange(of, x, parts, [memory]) for x in (g, g, 0 * g, 0 * g, 0 * g)]
    assert all(bool(out.isfinite().all()) for out in outs)
    left = memory.buffers["residual"]["p0"].double()
    assert (sum(outs) + left).tolist() == (2 * g[0].double()).tolist()
    assert not exchange(of, g * INF, parts, [memory]).isfinite().all(), "what is infinite is passed on, for AMP to see"


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("of", [TopK(density=0.3), OneBit(), PowerSGD(rank=2), ACPSGD(rank=2), Dense()], ids=str)
def test_a_step_that_is_not_finite_changes_no_residual(of: Compressor, bad: float) -> None:
    parts, memories, n = placed((20, 24), (40,)), [Memory(), Memory()], 520
    exchange(ErrorFeedback(of=TopK(density=0.05)), gradients(0, n, 2), parts, memories)
    before = [torch.cat([m.buffers["residual"][p.name] for p in parts]) for m in memories]
    g = gradients(1, n, 2)
    g[1, 7] = bad
    out = exchange(ErrorFeedback(of=of), g, parts, memories)
    lost = ~out.isfinite()
    assert bool(lost[7])
    for memory, old, mine in zip(memories, before, g, strict=True):
        left = torch.cat([memory.buffers["residual"][p.name] for p in parts])
        assert torch.equal(left[lost], old[lost]), "nothing of it was delivered"
        assert bool(left.isfinite().all()) and bool(mine[~lost].isfinite().all())
    # finite elements are treated as in any other step
    now = sum(torch.cat([m.buffers["residual"][p.name] for p in parts]) for m in memories)
    torch.testing.assert_close((out + now)[~lost].float(), (g.sum(0) + sum(before))[~lost], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("of", [PowerSGD(rank=2), PowerSGD(rank=2, iterations=2), ACPSGD(rank=2)], ids=str)
def test_factored_and_dense_contributions_leave_the_same_residual(of: Compressor, dtype: torch.dtype) -> None:
    parts, fed, bare = placed((20, 24), (40,), (30, 40)), Memory(), Memory()
    for step in range(4):
        before = torch.cat([fed.buffers["residual"][p.name] for p in parts]) if step else torch.zeros(1720)
        x = gradients(step, 1720).to(dtype)[0]
        exchange(ErrorFeedback(of=of), x[None], parts, [fed])
        total = x.float() + before
        bucket = Bucket(0, total.clone().to(dtype), tuple(parts), 0)
        (own,) = together([of.reduce(Rank(0, 1), bucket, bare)])
        assert own.dtype == dtype and torch.allclose(own, bucket.data, rtol=1e-4, atol=1e-4)
        left = torch.cat([fed.buffers["residual"][p.name] for p in parts])
        torch.testing.assert_close(left, total - own.float(), rtol=1e-4, atol=1e-4)


def test_a_huge_but_finite_gradient_is_a_step_like_any_other() -> None:
    """The sum of its elements is not finite, which usually marks a bad step."""
    memory, parts = Memory(), placed((4,))
    g = torch.tensor([[3e38, 3e38, 2e38, 0.0]])
    out = exchange(ErrorFeedback(of=TopK(density=0.5)), g, parts, [memory])
    torch.testing.assert_close((out + memory.buffers["residual"]["p0"].double()).float(), g[0])
    assert memory.buffers["residual"]["p0"].tolist() == pytest.approx([0.0, 0.0, 2e38, 0.0])


def test_kept_values_are_not_copied_and_follow_new_buckets() -> None:
    memory, parts = Memory(), placed((4,), (6,))
    bucket = Bucket(0, torch.zeros(10), tuple(parts), 0)
    memory.flat("residual", bucket)
    memory.keep("residual", bucket, values := torch.arange(10.0))
    assert memory.flat("residual", bucket).data_ptr() == values.data_ptr()
    alone = Bucket(0, torch.zeros(6), (parts[1]._replace(start=0, stop=6),), 4)
    assert torch.equal(memory.flat("residual", alone), values[4:])
    assert torch.equal(memory.flat("residual", bucket), values), "and joined again"


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rounding_errors_of_narrow_gradients_wait_in_the_residual(dtype: torch.dtype) -> None:
    """Dense sends its input, which is x rounded: only error feedback keeps the rounding error."""
    parts, memory, n, of = placed((64,)), Memory(), 64, ErrorFeedback(of=Dense())
    memory.flat("residual", Bucket(0, torch.zeros(n, dtype=dtype), tuple(parts), 0), torch.float32).fill_(2.0**-12)
    g = torch.ones(1, n).to(dtype)
    out = exchange(of, g, parts, [memory])
    assert torch.equal(out, torch.ones(n).double()), "2^-12 is too little for 1 in either type"
    assert torch.equal(memory.buffers["residual"]["p0"], torch.full((n,), 2.0**-12))
