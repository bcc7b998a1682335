"""Tests Cast against torch's own hooks on gloo, and the rounding of its formats."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.ranks import exchange, experiment, placed, run
from workbench.compressors import Cast
from workbench.engine.collectives.wire import LeaveEvent, Wire, connect_store, host_store
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import Change

pytestmark = pytest.mark.ranks

HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
formats = pytest.mark.parametrize("to", ["fp16", "bf16"])


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_gloo(ranks: int, what: Callable[[int, Wire], torch.Tensor]) -> list[torch.Tensor]:
    """Returns each rank's result of `what`, on threads with a gloo group."""
    store, host, port = host_store()
    tag, made = uuid.uuid4().hex, {}

    def one(rank: int) -> None:
        wire = Wire(connect_store(host, port, tag), rank, ranks, "hook", LeaveEvent(), timeout=60)
        made[rank] = what(rank, wire)
        wire.close()

    threads = [threading.Thread(target=one, args=(r,)) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    del store
    return [made[r] for r in range(ranks)]


def ours(codec: Cast, x: torch.Tensor, rank: int, wire: Wire) -> torch.Tensor:
    """Runs `reduce` on a share of x, as a strategy does."""
    bucket = Bucket(0, x / wire.size, (), 0)
    child, answer = codec.reduce(Rank(rank, wire.size), bucket, Memory()), None
    while True:
        try:
            op = child.send(answer)
        except StopIteration:
            return bucket.data
        assert op.verb == "all_reduce"
        wire.wait(wire.all_reduce(op.args[0]))
        answer = op.args[0]


@formats
@pytest.mark.parametrize("ranks", [2, 4])
def test_cast_is_bit_identical_to_torchs_hook_on_gloo(to: str, ranks: int) -> None:
    """Division by a power of 2 is exact before and after the cast, in the normal range of both formats."""

    def both(rank: int, wire: Wire) -> torch.Tensor:
        x = noise(rank, 5000)
        x += 0.01 * x.sign()
        theirs = HOOKS[to](wire.group, (x.clone(),)).wait()
        return torch.stack([theirs, ours(Cast(to=to), x, rank, wire)])

    made = on_gloo(ranks, both)
    assert all(torch.equal(pair[0], pair[1]) for pair in made)
    assert all(torch.equal(pair, made[0]) for pair in made)
    exact = sum(noise(r, 5000) + 0.01 * noise(r, 5000).sign() for r in range(ranks)) / ranks
    assert 0 < float((made[0][1] - exact).norm() / exact.norm()) < {"fp16": 1e-3, "bf16": 1e-2}[to]


def test_dividing_first_avoids_overflow_in_the_cast() -> None:
    """torch's hook casts before it divides, so it overflows."""

    def both(rank: int, wire: Wire) -> torch.Tensor:
        x = torch.tensor([98304.0, 1.0]) * (rank == 0)
        theirs = default_hooks.fp16_compress_hook(wire.group, (x.clone(),)).wait()
        return torch.stack([theirs, ours(Cast(to="fp16"), x, rank, wire)])

    for theirs, own in on_gloo(2, both):
        assert theirs.isinf().tolist() == [True, False] and own.tolist() == [49152.0, 0.5]


@pytest.mark.parametrize(("to", "off"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_each_element_is_rounded_to_the_nearest_value_of_the_format(to: str, off: float) -> None:
    x = noise(3, 1, 100_000)
    x += 0.001 * x.sign()
    out = exchange(Cast(to=to), x, placed((100_000,)), [Memory()])
    worst = float(((out - x[0]).abs() / x[0].double().abs()).max())
    assert 0.9 * off < worst <= off


def test_cast_sends_half_the_bytes_of_dense_and_switches_formats_live() -> None:
    sessions = run(experiment(4, 8, compressor=Cast()), Change(5, "to", "fp16"))
    dense = run(experiment(4, 8))[0]
    for step in (3, 7):
        half, whole = (sum(n for k, _, n in s.record.comm() if k == step) for s in (sessions[0], dense))
        assert half * 2 == whole
