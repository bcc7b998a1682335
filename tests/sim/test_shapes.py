"""Tests the four hard shapes in the simulator, with sizes only: each shows its paper's effect and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import experiment, toy
from workbench import simulate
from workbench.fabric import Fabric, Link
from workbench.partitions import Pipeline
from workbench.partitions.schedules import GPipe, OneFOneB, Schedule
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, ByteScheduler, ZeRO3

pytestmark = pytest.mark.ranks

LAYERS, WIDTH = 8, 64
LAYER = 4 * WIDTH * WIDTH  # bytes of a layer, which fills one bucket
BYTES = ByteScheduler(partition_mb=1.0, credit_mb=0.001)  # each layer is one piece, and pieces are sent one by one
PACE = 100.0  # ms: 30 forward, 60 backward, 10 update


def deep() -> nn.Module:
    """Equal layers with a bucket each."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def data(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One batch of four examples."""
    return [(torch.ones(4, WIDTH), torch.zeros(4, WIDTH))]


def exchange(ms: float, ranks: int = 2) -> Fabric:
    """Returns a Fabric on which the all-reduce of one bucket takes `ms`."""
    return Fabric(link=Link(bandwidth=2 * (ranks - 1) / ranks * LAYER * 8e-6 / (ms * 1e-3)))


def simulated(strategy: Any, ranks: int = 2, steps: int = 6, changes: tuple[Change, ...] = (), **rest: Any) -> Any:
    """Returns a simulated run with sizes only."""
    rest = {"pace": PACE, "bucket_mb": LAYER / 1e6, "task": toy(model=deep, data=data), **rest}
    return simulate(experiment(ranks, steps, strategy=strategy, **rest), changes=changes)


def compute(run: Any, name: str, rank: int = 0) -> Any:
    """Returns the spans of one phase of compute on a rank, in order of time."""
    spans = run.spans
    return spans[(spans["rank"] == rank) & (spans["lane"] == "compute") & (spans["name"] == name)].sort_values("t0")


def comm(run: Any, rank: int = 0) -> Any:
    spans = run.spans
    return spans[(spans["rank"] == rank) & (spans["lane"] == "comm")].sort_values("t0")


def period(run: Any) -> float:
    """Returns the seconds between the starts of the last two steps' forwards on rank 0."""
    begins = compute(run, "forward").groupby("step")["t0"].min().to_numpy()
    return float(begins[-1] - begins[-2])


# -- ByteScheduler


def test_the_next_forward_begins_before_the_last_gradient_has_been_sent() -> None:
    run = simulated(BYTES, fabric=exchange(20.0))
    for step in range(2, 6):  # ranks first settle their exchanges once, because they learn the order of gradients
        begins = float(compute(run, "forward").query(f"step == {step}")["t0"].min())
        sent = float(comm(run)["t1"].to_numpy()[LAYERS * step - 1])
        assert begins < sent


def test_buckets_that_the_next_forward_needs_first_overtake_waiting_ones() -> None:
    order = comm(simulated(BYTES, fabric=exchange(20.0)))["name"].to_list()[:LAYERS]
    # 20 ms each: whenever the link is free, the ready bucket whose layers come first goes next
    assert order == [f"all_reduce bucket {i}" for i in (0, 2, 5, 7, 6, 4, 3, 1)]


@pytest.mark.parametrize("ms", [10.0, 20.0, 40.0])
def test_byte_scheduler_beats_ddp_if_the_tail_is_exposed_but_not_the_lower_bound(ms: float) -> None:
    scheduled, plain = (period(simulated(s, fabric=exchange(ms))) for s in (BYTES, DDP()))
    assert plain == pytest.approx((30 + 60 / LAYERS + LAYERS * ms + 10) * 1e-3, rel=1e-3)
    assert scheduled < 0.97 * plain
    assert scheduled >= max(PACE, LAYERS * ms) * 1e-3 - 1e-9


def test_byte_scheduler_gains_nothing_if_the_exchange_is_hidden() -> None:
    hidden = exchange(1.0)
    assert period(simulated(BYTES, fabric=hidden)) == pytest.approx(PACE * 1e-3, rel=0.02)


# -- ZeRO-3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_sends_three_halves_of_ddp_and_holds_one_share(ranks: int) -> None:
    zero, plain = (simulated(s, ranks, 4) for s in (ZeRO3(), DDP()))
    sent, usual = (comm(r).query("step == 2")["nbytes"].sum() for r in (zero, plain))
    kept = 2 * LAYER * (ranks - 1) / ranks  # the last layer stays for backward, which does not read the first
    assert sent + kept == 1.5 * usual
    held = zero.samples[zero.samples["name"] == "memory parameters"]
    for rank in range(ranks):
        most = float(held[held["rank"] == rank].sort_values("t", kind="stable")["value"].iloc[-1])
        assert most == LAYERS * LAYER / ranks + LAYER * (1 - 1 / ranks), "one is whole; what is coming is in flight"


def test_zero_gathers_ahead_so_that_a_fast_link_costs_it_little() -> None:
    free, linked, late = (period(simulated(s, fabric=f)) for s, f in (
        (ZeRO3(), Fabric()), (ZeRO3(), exchange(1.0)), (ZeRO3(prefetch=0), exchange(1.0))))  # fmt: skip
    assert free == pytest.approx((30 + 60 + 10 / 2) * 1e-3), "each of two ranks updates its half"
    assert linked < free + 5e-3  # the first gathers of each pass and the last reduction cannot hide
    assert late > linked + 5e-3  # without prefetch no gather hides


def test_uneven_buckets_are_gathered_whole() -> None:
    uneven = simulated(ZeRO3(), 3, 3)
    chunk = 4 * -(-WIDTH * WIDTH // 3)
    assert set(comm(uneven).query("step == 2")["nbytes"]) == {2 * chunk}


# -- pipelines


def piped(stages: int, micros: int, steps: int, schedule: Schedule, ranks: int = 0) -> Any:
    """Simulates a pipeline with micro-batches of one example."""
    task = toy(model=deep, data=lambda rank, ranks, seed: [(torch.ones(micros, WIDTH), torch.zeros(micros, WIDTH))])
    partition = Pipeline(stages=stages, micros=micros, schedule=schedule)
    return simulated(DDP(), ranks or stages, steps, partition=partition, task=task)


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=str)
@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (4, 2), (8, 8), (2, 1)])
def test_bubble_and_micro_batches_in_flight_match_the_formulas(schedule: Schedule, stages: int, micros: int) -> None:
    run = piped(stages, micros, 3, schedule)
    step = run.spans[(run.spans["step"] == 1) & (run.spans["lane"] == "compute") & (run.spans["name"] != "update")]
    makespan = float(step["t1"].max() - step["t0"].min())
    busy = float((step["t1"] - step["t0"]).sum()) / stages
    assert 1 - busy / makespan == pytest.approx((stages - 1) / (micros + stages - 1), abs=1e-9)
    for rank in range(stages):
        few = min(micros, stages - rank) if isinstance(schedule, OneFOneB) else micros
        assert in_flight(step[step["rank"] == rank]) == few


def in_flight(spans: Any) -> int:
    """Returns the largest number of micro-batches between the start of forward and the end of backward."""
    events = [(t, 1) for t in spans[spans["name"].str.startswith("forward")]["t0"]]
    events += [(t, -1) for t in spans[spans["name"].str.startswith("backward")]["t1"]]
    return int(np.cumsum([change for _, change in sorted(events)]).max())


def test_stages_hand_on_activations_and_their_gradients() -> None:
    stages, micros = 4, 4
    run = piped(stages, micros, 2, OneFOneB())
    sent = comm(run).query("step == 1")
    assert set(sent[~sent["name"].str.contains("loss")]["nbytes"]) == {4 * WIDTH}, "one example of one layer's width"
    for rank in range(stages):
        names = sorted(name.split(" in ")[0] for name in comm(run, rank).query("step == 1")["name"])
        ways = ["activation"] * (rank < stages - 1) + ["gradient"] * (rank > 0)
        kinds = [f"send {way} {micro}" for way in ways for micro in range(micros)]
        assert names == sorted(kinds + ["send loss"] * (stages - 1) * (rank == stages - 1))


def test_between_replicas_a_stage_exchanges_what_it_holds() -> None:
    run = piped(2, 4, 2, OneFOneB(), ranks=4)
    sums = run.spans.query("lane == 'comm' and step == 1")
    sums = sums[sums["name"].str.startswith("all_reduce")]
    assert set(sums["name"].str.split(" in ").str[1]) == {"data [0, 2]", "data [1, 3]"}
    whole = simulated(DDP(), 2, 2).spans.query("lane == 'comm' and step == 1")["nbytes"].sum()
    assert sums["nbytes"].sum() == whole, "two stages of two replicas send what two replicas do"


def test_a_pipeline_needs_as_many_parts_as_stages() -> None:
    with pytest.raises(KnobError, match=f"{LAYERS} parts"):
        piped(LAYERS + 1, 4, 1, GPipe())


def test_impossible_stages_raise_knob_error() -> None:
    wanted = experiment(2, 1, partition=Pipeline(), pace=PACE)
    with pytest.raises(KnobError, match="make the model a Sequential"):
        simulate(wanted)
    narrow = toy(model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with pytest.raises(KnobError, match="does not run on the meta device"):
        simulate(experiment(2, 1, partition=Pipeline(), pace=PACE, task=narrow))


def test_a_run_becomes_a_pipeline_midway_or_raises_knob_error() -> None:
    cut = Change(1, "partition", "Pipeline")
    assert [c.path for c in simulated(DDP(), 4, 3, changes=(cut,)).changes] == ["partition"]
    with pytest.raises(KnobError, match="4 ranks are not a multiple of that"):
        simulated(DDP(), 4, 3, changes=(cut, Change(2, "partition.stages", 3)))
