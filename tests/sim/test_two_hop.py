"""Tests the two-hop quantised reduce of more_shapes.py on the engine, with ranks as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import experiment, run, weights
from tests.sim.more_shapes import TwoHop, coded
from workbench.rank import Bucket, Memory, Rank

pytestmark = pytest.mark.ranks

STEP = 1 / 254  # half a code, relative to a row's largest magnitude


def test_two_hops_stay_within_half_a_code_per_quantisation() -> None:
    rng = torch.Generator().manual_seed(1)
    size, n = 3, 100
    inputs = [torch.randn(n, generator=rng) for _ in range(size)]
    outputs = in_turns([bucket_of(x.clone()) for x in inputs])
    exact = sum(inputs)
    assert isinstance(exact, torch.Tensor)
    first = sum(float(x.abs().max()) for x in inputs) * STEP
    bound = first + (float(exact.abs().max()) + first) * STEP
    assert float((outputs[0] - exact).abs().max()) <= bound
    assert float((outputs[0] - exact).abs().max()) > bound / 100, "nothing was quantised"
    assert all(torch.equal(outputs[0], other) for other in outputs), "all ranks decode the owner's codes"


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scale = coded(torch.zeros(2, 4))
    assert not codes.any()
    assert torch.equal(codes * scale, torch.zeros(2, 4))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_hop_trains_like_dense_with_a_quarter_of_the_bytes(ranks: int) -> None:
    coarse = run(experiment(ranks, 10, compressor=TwoHop()))
    dense = run(experiment(ranks, 10))
    torch.testing.assert_close(weights(coarse[0]), weights(dense[0]), rtol=0.05, atol=0.01)
    assert all(torch.equal(weights(coarse[0]), weights(other)) for other in coarse)
    if ranks > 1:
        sent, plain = (sum(n for _, _, n in s[0].record.comm()) for s in (coarse, dense))
        assert 0.25 <= sent / plain < 0.27


def bucket_of(x: torch.Tensor) -> Bucket:
    return Bucket(0, x, (), 0)


def in_turns(buckets: list[Bucket]) -> list[torch.Tensor]:
    """Runs every rank's `reduce`, one collective after the other, by the definitions of the collectives."""
    size = len(buckets)
    children = [TwoHop().reduce(Rank(i, size), b, Memory()) for i, b in enumerate(buckets)]
    answers: list[Any] = [None] * size
    while asked := [op for op in map(_resumed, children, answers) if op is not None]:
        assert len(asked) == size, "one ended before the others"
        xs = [op.args[0] for op in asked]
        if asked[0].verb == "all_gather":
            answers = [torch.stack(xs)] * size
        else:
            assert asked[0].verb == "all_to_all"
            answers = [torch.stack([x[i] for x in xs]) for i in range(size)]
    return [b.data for b in buckets]


def _resumed(child: Any, answer: Any) -> Any:
    try:
        return child.send(answer)
    except StopIteration:
        return None
