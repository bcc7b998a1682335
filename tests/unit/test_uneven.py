"""Tests rows of any length: the verb `all_to_allv`, its cost, and compressors that choose by values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.ranks import experiment, run, weights
from workbench import Costs, simulate
from workbench.compressors._sparse import Sparse
from workbench.fabric import Fabric, Link, Load, uneven
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Rank, StrategyError
from workbench.strategies import DDP

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class KeepsLarge(Sparse):
    """Keeps entries above the mean magnitude: a different number on every rank, none for zeros."""

    def choose(self, x: torch.Tensor, memory: Memory, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        index = (x.abs() > x.abs().mean()).nonzero().flatten()
        return index, x[index]


@dataclass(frozen=True, kw_only=True)
class Ragged(DDP):
    """Rank i sends i + j elements to rank j, none to itself, in every step before it trains."""

    short: int = 0

    async def step(self, rank: Rank, state: Any) -> None:
        p = range(rank.size)
        lengths = tuple(tuple((i + j) * (i != j) for j in p) for i in p)
        rows = [torch.full((n,), float(10 * rank.index + j)) for j, n in enumerate(lengths[rank.index])]
        if self.short:
            rows[0] = rows[0][: -self.short]
        got = await rank.all_to_allv(rows, lengths, "ragged")
        for i, row in enumerate(got):
            assert row.tolist() == [float(10 * i + rank.index)] * lengths[i][rank.index]
        await super().step(rank, state)


def test_load_is_that_of_the_busiest_port_and_messages_count_pairs() -> None:
    ring = ((0, 4, 0), (0, 0, 4), (4, 0, 0))
    assert uneven(ring, 4, 0) == Load(sent=16, busiest=16, total=48, messages=1)
    hot = ((9, 0, 0), (5, 0, 0), (5, 0, 0))
    assert uneven(hot, 2, 1) == Load(sent=10, busiest=20, total=20, messages=1)
    assert uneven(hot, 2, 0).sent == 0


def test_rows_reach_their_ranks_on_the_engine_at_the_cost_of_their_bytes() -> None:
    for s in run(experiment(3, 3, strategy=Ragged())):
        sent = [n for step, what, n in s.record.comm() if "ragged" in what]
        assert sent == [4 * sum(s.rank.index + j for j in range(3) if j != s.rank.index)] * 3


@pytest.mark.parametrize("real", [True, False])
def test_rows_reach_their_ranks_in_the_simulator_in_the_time_of_the_busiest_port(real: bool) -> None:
    fabric = Fabric(link=Link(bandwidth=1, latency=2))
    spans = simulate(experiment(3, 2, strategy=Ragged(), pace=10, fabric=fabric), real=real).spans
    ragged = spans[spans.name.str.contains("ragged") & (spans.lane == "comm")]
    for r, rows in ragged.groupby("rank"):
        assert rows.nbytes.tolist() == [4 * sum(r + j for j in range(3) if j != r)] * 2
    busiest = 4 * (2 + 3) * 8e-6  # rank 2 sends 2 + 3 elements
    assert (ragged.t1 - ragged.t0).tolist() == pytest.approx([2 * 2e-3 + busiest] * 6)


def test_wrong_lengths_raise_strategy_error() -> None:
    with pytest.raises(StrategyError, match=r"rank 1's rows have \[0, 0\] elements, but `lengths` gives \[1, 0\]"):
        simulate(experiment(2, 2, strategy=Ragged(short=1), pace=10))


def test_a_choice_by_values_gives_the_same_on_engine_and_simulator() -> None:
    e = experiment(3, 6, compressor=KeepsLarge())
    sessions = run(e)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    simulated = simulate(e.set("pace", 10), real=True)
    losses = simulated.samples[(simulated.samples["rank"] == 0) & (simulated.samples.name == "loss")].value.tolist()
    assert sessions[0].record.losses() == pytest.approx(losses, rel=1e-5)
    spans = simulated.spans
    for s in sessions:
        mine = spans[(spans["rank"] == s.rank.index) & (spans.lane == "comm")].sort_values("t0", kind="stable")
        assert [n for _, _, n in s.record.comm()] == mine.nbytes.tolist()


def test_each_rank_sends_its_length_and_its_pairs() -> None:
    sessions = run(experiment(3, 3, compressor=KeepsLarge()))
    sizes = [b.data.numel() for b in sessions[0].layout.buckets]
    for s in sessions:
        kept = [v for step, what, _, v in s.record.samples if what == "density" and step == 2]
        want = sum(2 * (8 + 8 * round(k * n)) for k, n in zip(kept, sizes, strict=True))
        assert sum(n for step, _, n in s.record.comm() if step == 2) == want


def test_one_rank_alone_keeps_its_choice() -> None:
    (session,) = run(experiment(1, 4, compressor=KeepsLarge()))
    assert not torch.equal(weights(session), weights(run(experiment(1, 4))[0]))


def test_a_simulation_with_sizes_uses_the_measured_density_and_notes_the_estimate() -> None:
    e = experiment(4, 12, compressor=KeepsLarge(), pace=10)
    real = simulate(e, real=True)
    costs = Costs.measured(real)
    assert 0.2 < costs.density < 0.5
    guess, known = simulate(e), simulate(e, costs=costs)
    sent = [int(run.spans[run.spans.step == 9].nbytes.sum()) for run in (guess, known, real)]
    assert sent[0] < sent[1] / 10 and sent[1] == pytest.approx(sent[2], rel=0.05)
    details = [run.details("estimate")[0][2] for run in (guess, known)]
    assert [d["measured"] for d in details] == [False, True]
    assert not real.details("estimate")
