"""Tests gossip in 8 bits: copies of neighbours, results without rounding, and traffic."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.ranks import ended, experiment, live, run, toy, weights
from tests.sim.insides import parameters, simulated
from tests.sim.virtual import comm, paced, samples, seconds, stack
from tests.unit.test_engine_control import until
from tests.unit.test_gossip import matrix
from tests.unit.test_gossip_graphs import Plain, exact_task
from workbench import simulate
from workbench.compressors import TopK
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, Gossip, LowPrecisionDecentralized

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_without_rounding_it_is_gossip_on_a_ring_with_weights_of_one_third(ranks: int) -> None:
    """A round is W x + (the optimizer's step). That is D-PSGD with the gradient taken before the mixing."""
    e = paced(ranks, 10, strategy=LowPrecisionDecentralized(bits=32), task=exact_task(momentum=0.9))
    plain = Plain(matrix("ring", ranks), adapt_first=False, momentum=0.9)
    for step in range(10):
        plain.step(step)
    for sessions in (simulated(e)[1], run(e.set("pace", 0.0))):
        found = torch.stack([weights(s) for s in sessions])
        torch.testing.assert_close(found, plain.parameters(), rtol=0, atol=1e-13)


def of_neighbours(sessions: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the ranks' copies of their neighbours, and the originals, pair by pair."""
    copies, originals = [], []
    for s in sessions:
        near = {(s.rank.index - 1) % len(sessions), (s.rank.index + 1) % len(sessions)}
        assert set(s.state.known.buffers) == {str(r) for r in near | {s.rank.index}}
        for other in near:
            for name, copy in s.state.known.buffers[str(other)].items():
                copies.append(copy)
                originals.append(sessions[other].state.known.buffers[str(other)][name])
    return copies, originals


@pytest.mark.parametrize("host", ["engine", "simulator"])
@pytest.mark.parametrize("every", [1, 3])
def test_after_many_rounds_copies_are_bit_identical_to_their_originals(host: str, every: int) -> None:
    """Also through changes of bucket size, because copies are stored by place in the model."""
    e = paced(4, 100, strategy=LowPrecisionDecentralized(every=every))
    plan = (Change(40, "bucket_mb", 0.02), Change(70, "bucket_mb", 0.01))
    sessions = simulated(e, *plan)[1] if host == "simulator" else run(e.set("pace", 0.0), *plan)
    copies, originals = of_neighbours(sessions)
    assert len(copies) == 4 * 2 * 6 and all(torch.equal(a, b) for a, b in zip(copies, originals, strict=True))
    if every == 1:  # otherwise the last steps have moved the parameters further than the copies
        for s in sessions:
            own = s.state.known.buffers[str(s.rank.index)]
            found = torch.cat([own[name].double() for name, _ in sorted(s.model.named_parameters())])
            assert torch.equal(found, weights(s))


@pytest.mark.parametrize("bits", [8, 32])
def test_ranks_converge_in_spite_of_rounding(bits: int) -> None:
    """On a ring of 4 each round leaves 1/3 of the distance; rounding adds an error of 1/510 of it."""
    e = paced(4, 16, strategy=LowPrecisionDecentralized(bits=bits), task=toy(partial(torch.optim.SGD, lr=0.3)))
    still = Change(6, "lr", 1e-30)
    spread = []
    for steps in (6, 8, 10, 12):
        found = parameters(simulated(e.set("steps", steps), still)[1])
        spread.append(float((found - found.mean(0)).norm()))
    assert spread[0] > 1e-2
    for a, b in pairwise(spread):
        assert b == pytest.approx(a / 9, rel=1e-3 if bits == 32 else 0.25)


def test_it_learns_like_gossip() -> None:
    held = {}
    for strategy in (Gossip(), LowPrecisionDecentralized()):
        e = paced(4, 80, strategy=strategy, eval_every=80)
        held[strategy] = samples(simulate(e, real=True), "held_out")
    exact, rounded = held.values()
    assert rounded[-1] < 0.5 * rounded[0] and rounded[-1] == pytest.approx(exact[-1], rel=0.02)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_send_one_byte_per_parameter_and_a_header_per_bucket(bits: int, ranks: int) -> None:
    e = paced(ranks, 9, strategy=LowPrecisionDecentralized(bits=bits, every=4))
    sessions = run(e.set("pace", 0.0))
    sizes = [b.nbytes // 4 for b in sessions[0].layout.buckets]
    once = sum(n + 8 if bits == 8 else 4 * n for n in sizes)
    neighbours = min(2, ranks - 1)
    for s in sessions:
        by_step = [sum(n for at, _, n in s.record.comm() if at == step) for step in range(9)]
        assert by_step == [neighbours * once * (step % 4 == 0) for step in range(9)]
    whole = simulate(e)
    assert [sum(n for _, _, n in comm(whole, r)) for r in range(ranks)] == [neighbours * once * 3] * ranks


def test_it_is_fastest_with_high_latency_and_low_bandwidth() -> None:
    """One bucket of 0.32 MB on 8 ranks at 10 Mbit/s and 20 ms: two messages of 25 %, after the update."""

    def lasts(strategy: Any) -> float:
        e = paced(8, 4, 1.0, 10.0, latency=20.0, strategy=strategy, task=stack(8, 100), bucket_mb=1.0)
        return float(seconds(simulate(e))[-1])

    wire = 8 * 100 * 100 * 8e-6 / 10.0
    mine = lasts(LowPrecisionDecentralized())
    assert mine == pytest.approx(0.001 + 2 * (0.020 + wire), rel=1e-3)
    assert lasts(Gossip()) == pytest.approx(0.0001 + 2 * (0.020 + 4 * wire), rel=1e-3)
    assert mine < 0.35 * lasts(DDP()) and mine < 0.5 * lasts(Gossip())


def test_live_changes_of_bits_keep_the_copies() -> None:
    sessions = run(experiment(3, 12, strategy=LowPrecisionDecentralized()), Change(4, "strategy.bits", 32),
                   Change(6, "every", 2), Change(9, "strategy.bits", 8), Change(10, "every", 1))  # fmt: skip
    copies, originals = of_neighbours(sessions)
    assert all(torch.equal(a, b) for a, b in zip(copies, originals, strict=True))
    sent = [sum(n for at, _, n in sessions[0].record.comm() if at == step) for step in range(12)]
    assert sent[3] < sent[4] == sent[5] == sent[6] == sent[8] and sent[7] == sent[9] == 0 and sent[10] == sent[3]


def test_all_ranks_of_the_ring_apply_a_change_before_the_same_step() -> None:
    sessions = live(experiment(5, 0, pace=5.0, strategy=LowPrecisionDecentralized(every=2)))
    try:
        for k, (path, value) in enumerate([("bucket_mb", 0.03), ("every", 1), ("strategy", "DDP")]):
            until(lambda k=k: all(s.rank.step > 5 * k + 2 for s in sessions))
            sessions[0].request({"kind": "change", "id": str(k), "path": path, "value": value})
            until(lambda k=k: len(sessions[0].record.noted("change")) > k)
        step = sessions[0].record.noted("change")[2][0]
        until(lambda: all(s.rank.step > step + 2 for s in sessions))
        for s in sessions:
            names = {r[0]: r[2] for r in s.record if r[1] == "step"}
            assert names[step - 1] == "LowPrecisionDecentralized" and names[step] == "DDP"
        sessions[0].request({"kind": "stop"})
        ended(sessions)
    finally:
        for s in sessions:
            s.abort()
            assert s.join(60)


def test_switching_in_and_out_without_learning_changes_nothing() -> None:
    there = [Change(3, "lr", 1e-30), Change(4, "strategy", "LowPrecisionDecentralized"), Change(8, "strategy", "DDP")]
    stay, went = (run(experiment(3, 10, strategy=DDP()), *plan) for plan in (there[:1], there))
    torch.testing.assert_close(weights(went[0]), weights(stay[0]), rtol=1e-6, atol=1e-7)


def test_a_compressor_is_refused_with_a_reason() -> None:
    with pytest.raises(KnobError, match=r"has its own codes and cannot use .*TopK.* use Dense with it, or LocalSGD"):
        experiment(3, strategy=LowPrecisionDecentralized(), compressor=TopK.usual())
    with pytest.raises(KnobError, match=r"bits=4: must be one of 8, 32"):
        experiment(3, strategy=LowPrecisionDecentralized(bits=4))
