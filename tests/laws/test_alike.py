"""Compares the simulation of one replica, which the claim `alike` permits, with a simulation of every rank."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from tests.ranks import make_fitting, shipped
from workbench import Costs, KnobError, plan, simulate
from workbench.analysis import why_silent
from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link, Slow
from workbench.optimizers import SGD, AdamW
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.partitions.schedules import Interleaved, ZeroBubble
from workbench.rank import Rank, StrategyError
from workbench.settings import Change
from workbench.sim.costs.durations import Duration
from workbench.strategies import DDP, HSDP, Gossip, HpZ, LocalSGD, Strategy, ZeRO1, ZeRO2, ZeRO3
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks

SITES = Fabric(link=Link(bandwidth=2000.0), site=4, between_bandwidth=100.0, between_latency=1.0, host=2.0, disk=0.5)
E = Experiment(task=ByteGPT(layers=2), ranks=8, optimizer=AdamW(), batch=8, pace=60.0, bucket_mb=0.5, steps=9,
               eval_every=4, fabric=Fabric(link=Link(bandwidth=2000.0), host=2.0, disk=0.5))  # fmt: skip
ALIKE = {name: cls for name, cls in shipped(Strategy).items() if cls.alike}
COLUMNS = ("step", "lane", "name", "asked", "t0", "t1", "nbytes")


def spans(run: Any, rank: int) -> list[tuple[Any, ...]]:
    """Returns all spans of a rank in a fixed order. It names other ranks by their place in their replica."""
    rows, first = run.timeline.spans.rows(), run.experiment.partition.size
    mine = rows[rows.rank == rank]
    columns = [getattr(mine, c).tolist() for c in COLUMNS]

    def named(name: str) -> str:
        plain = re.sub(r" \[.*?\]", "", name)
        return re.sub(r"(?:(?<= to )|(?<= from ))\d+$", lambda found: str(int(found[0]) % first), plain)

    return sorted((*row[:2], named(str(row[2])), *row[3:]) for row in zip(*columns, strict=True))


def numbers(run: Any, rank: int) -> list[tuple[Any, ...]]:
    rows = run.timeline.samples.rows()
    mine = rows[rows.rank == rank]
    return sorted(zip(mine.step.tolist(), map(str, mine.name), mine.t.tolist(), mine.value.tolist(), strict=True))


def stands_for_all(e: Experiment) -> None:
    few, every = simulate(e, alike=True), simulate(e)
    first = e.partition.size
    assert set(few.timeline.spans.rows().rank.tolist()) == set(range(first))
    for rank in range(e.ranks):
        alone = spans(few, rank % first)
        if rank < first or not e.strategy.offloads:
            assert spans(every, rank) == alone
        if rank < first:
            assert numbers(few, rank) == numbers(every, rank)


@pytest.mark.parametrize("name", [name for name, cls in ALIKE.items() if not cls.offloads])
def test_one_rank_does_what_every_rank_does(name: str) -> None:
    stands_for_all(replace(E, strategy=make_fitting(ALIKE[name], 8)))


@pytest.mark.parametrize("name", [name for name, cls in ALIKE.items() if cls.offloads])
def test_a_rank_with_a_few_more_bytes_is_only_slightly_later(name: str) -> None:
    """A shard has a counter of 4 bytes for each parameter in it, and the last shard is shorter."""
    few, every = (simulate(replace(E, strategy=ALIKE[name]()), alike=alike) for alike in (True, False))
    for rank in range(8):
        mine, others = spans(few, 0), spans(every, rank)
        assert [row[0] for row in mine] == [row[0] for row in others]
    ends = [max(row[5] for row in spans(run, 0)) for run in (few, every)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


@pytest.mark.parametrize("name", [n for n, cls in shipped(Compressor).items() if cls.alike and n != "Accordion"])
def test_one_rank_does_what_every_rank_does_under_every_compressor(name: str) -> None:
    """Accordion is excluded, because only its first rank records the levels."""
    optimizer = SGD(momentum=0.9) if name == "DGC" else AdamW()
    stands_for_all(replace(E, compressor=shipped(Compressor)[name](), optimizer=optimizer))


@pytest.mark.parametrize("fabric", [E.fabric, SITES], ids=["one site", "two sites"])
@pytest.mark.parametrize(
    "way",
    [Pipeline(stages=2, micros=4), Tensor(ways=4), Pipeline(stages=2, micros=4, of=Tensor()),
     Tensor(ways=2, sequence=True), Pipeline(stages=2, micros=4, schedule=ZeroBubble()),
     Pipeline(stages=2, micros=4, schedule=Interleaved())],
    ids=lambda way: f"{type(way).__name__} {way.size}" if isinstance(way, (Pipeline, Tensor)) else "",
)  # fmt: skip
def test_a_replica_on_several_ranks_does_what_every_replica_does(way: Any, fabric: Fabric) -> None:
    stands_for_all(replace(E, partition=way, batch=32, fabric=fabric))
    stands_for_all(replace(E, partition=way, batch=32, fabric=fabric, strategy=LocalSGD(every=3)))


@pytest.mark.parametrize(
    "change",
    [{}, {"strategy": ZeRO1()}, {"strategy": ZeRO2()}, {"strategy": ZeRO3()}, {"strategy": HSDP(group=8)},
     {"strategy": HpZ(group=8)}, {"partition": Pipeline(stages=4, micros=8), "batch": 32},
     {"partition": Pipeline(stages=2, micros=4, of=Tensor(sequence=True, checkpoint="units")), "batch": 32},
     {"partition": Tensor(ways=4), "batch": 32, "strategy": LocalSGD(every=2)}],
    ids=["DDP", "ZeRO1", "ZeRO2", "ZeRO3", "HSDP", "HpZ", "Pipeline", "Pipeline of Tensor", "Tensor"],
)  # fmt: skip
def test_64_ranks_on_8_sites_do_exactly_what_the_first_rank_does(change: dict[str, Any]) -> None:
    stands_for_all(replace(E, ranks=64, steps=3, fabric=replace(SITES, site=8), task=ByteGPT(layers=4), **change))


def test_slices_of_a_stage_have_different_parameters_and_are_all_simulated() -> None:
    few = simulate(replace(E, partition=Pipeline(stages=2, micros=4, of=Tensor()), batch=32), alike=True)
    sent = [sorted(row[6] for row in spans(few, rank) if row[1] == "comm") for rank in range(4)]
    assert sent[0] != sent[1] and sent[2] != sent[3]


class Teller(DDP):
    """Sends its neighbour a message, which its claim does not mention."""

    async def step(self, rank: Rank, state: Any) -> None:
        import torch

        await rank.send(torch.zeros(1), (rank.index + 1) % rank.size)
        await rank.recv(source=(rank.index - 1) % rank.size)
        await super().step(rank, state)


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        ({"strategy": Gossip()}, {}, "strategy=Gossip: its ranks do different work"),
        ({"fabric": Fabric(faults=(Slow(rank=1),))}, {}, r"fabric\.faults: ranks with faults differ from the other"),
        ({"fabric": Fabric(link=Link(bandwidth=9.0, jitter=0.1)), "partition": Pipeline(stages=2, micros=4)}, {},
         "jitter: it changes each message between stages separately; take jitter=0"),
        ({}, {"costs": Costs(forward=(0.1, 0.2))}, r"costs: ranks are not equally fast.*costs\.even\(ranks=8\)"),
        ({"fabric": replace(SITES, site=3)}, {}, r"fabric\.site=3: groups of 8 ranks are spread unevenly over"),
        ({}, {"changes": [Change(2, "bucket_mb", 1.0)]}, "alike: it needs sizes only, no changes"),
        ({}, {"real": True}, "alike: it needs sizes only, no changes"),
    ],
)  # fmt: skip
def test_alike_is_refused_if_ranks_differ(change: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        simulate(replace(E, **change), alike=True, **more)


def test_a_message_to_a_rank_that_another_stands_for_is_refused() -> None:
    with pytest.raises(StrategyError, match="a message to rank 1, which is not simulated, because another"):
        simulate(replace(E, strategy=Teller()), alike=True)


@pytest.mark.parametrize("ranks", [8, 512])
def test_the_expected_time_of_the_slowest_rank_matches_the_mean_of_random_draws(ranks: int) -> None:
    costs = Costs(forward=(Duration(0.3, 0.1),), backward=(Duration(0.6, 0.05),), update=0.1)
    chance = np.random.default_rng(3)
    drawn = chance.normal(0.3, 0.03, (4000, ranks)) + chance.normal(0.6, 0.03, (4000, ranks)) + 0.1
    even = costs.even(ranks)
    whole = sum(getattr(even, phase)[0].seconds for phase in ("forward", "backward", "update"))
    assert whole == pytest.approx(fmean(drawn.max(1)), rel=2e-3)
    assert even.even(ranks) == even


def test_a_faster_but_noisy_rank_may_be_the_slowest() -> None:
    costs = Costs(forward=(Duration(0.30, 0.0), Duration(0.29, 0.3)), backward=0.0, update=0.0)
    drawn = 0.29 * (1.0 + 0.3 * np.random.default_rng(5).normal(size=(4000, 256)))
    expected = fmean(np.maximum(drawn.max(1), 0.30))
    assert costs.even(512).forward[0].seconds == pytest.approx(expected, rel=2e-3)
    assert Costs(forward=(0.1, 0.3), backward=0.0, update=0.0).even(8).forward == (Duration(0.3),)


def test_all_ranks_on_one_site_of_any_size_are_alike() -> None:
    stands_for_all(replace(E, fabric=replace(SITES, site=16)))


def test_a_plan_of_thousands_of_ranks_equals_the_simulation_of_each_pair() -> None:
    e = replace(E, ranks=4096, fabric=replace(SITES, site=8), task=ByteGPT(layers=4))
    ways = [Whole(), Pipeline(stages=2, micros=8), Tensor(ways=4)]
    rows = plan(e, strategies=[DDP(), ZeRO3(), HSDP(group=8)], partitions=ways)
    assert {(type(row.strategy), type(row.partition)) for row in rows} == {
        (DDP, Whole), (ZeRO3, Whole), (HSDP, Whole), (DDP, Pipeline), (DDP, Tensor)}  # fmt: skip
    step = {(type(row.strategy), type(row.partition)): row.step_s for row in rows}
    assert step[HSDP, Whole] < step[ZeRO3, Whole]  # its gathers stay on a site


def test_a_plan_with_a_speed_per_rank_simulates_all_ranks() -> None:
    ways = {"strategies": [DDP()], "partitions": [Whole()]}
    uneven = Costs(forward=(0.01, 0.05), backward=0.02, update=0.001)
    e = replace(E, pace=0.0, ranks=4, eval_every=0)
    (row,) = plan(e, costs=uneven, **ways)
    assert row.step_s == pytest.approx(simulate(e, costs=uneven).summary()["step_s"], rel=0.05)


def test_the_record_states_how_many_ranks_each_simulated_rank_represents() -> None:
    few, every, two = simulate(E, alike=True), simulate(E), simulate(replace(E, partition=Tensor()), alike=True)
    assert [run.summary()["stands_for"] for run in (few, every, two)] == [8, 1, 4]
    assert "8 ranks (of which 1 stands for all)" in repr(few) and "8 ranks (of which 2 stand for all)" in repr(two)
    assert "8 ranks, " in repr(every)
    assert [why_silent(run.timeline) for run in (few, every, simulate(replace(E, ranks=1)))] == [
        "alike", "nobody", "alone",
    ]  # fmt: skip


def test_shared_work_between_pairs_of_a_plan_changes_no_result() -> None:
    e, ways = replace(E, eval_every=0), [Tensor(), Tensor(ways=4), Pipeline(stages=2, micros=4, of=Tensor())]
    alone = [row for way in ways for row in plan(e, strategies=[DDP()], partitions=[way])]
    assert sorted(plan(e, strategies=[DDP()], partitions=ways), key=str) == sorted(alone, key=str)
    assert len({row.peak for row in alone}) == len(alone) == 3
