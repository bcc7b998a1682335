"""Tests the report on a pipeline's idle time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.piped import piped
from tests.ranks import experiment, toy
from widgets.views.timeline import Timeline
from workbench import simulate
from workbench.analysis import find_straggler, measure_bubble, why_silent
from workbench.fabric import Fabric, Link, Slow
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.partitions.schedules import GPipe, Interleaved, OneFOneB, PipeDream, PipeDream2BW, ZeroBubble
from workbench.settings import Change
from workbench.strategies import DDP

pytestmark = pytest.mark.ranks

WIDTH = 16


EQUAL = (WIDTH,) * 4


def simulated(ranks: int, widths: tuple[int, ...] = EQUAL, steps: int = 10, *changes: Change, **rest: Any) -> Any:
    """Simulates layers of these widths on a virtual clock, with a batch of 8."""

    def model() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, w), nn.Linear(w, WIDTH)) for w in widths])

    def data(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.ones(8, WIDTH), torch.zeros(8, WIDTH))]

    e = experiment(ranks, steps, pace=100.0, task=toy(model=model, data=data, evaluate=None), **rest)
    return simulate(e, changes=changes).timeline


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=str)
@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (4, 1)])
def test_equal_stages_idle_for_the_minimum(schedule: Any, stages: int, micros: int) -> None:
    found = measure_bubble(simulated(4, partition=Pipeline(stages=stages, micros=micros, schedule=schedule)))
    assert found is not None and (found.stages, found.micros) == (stages, micros)
    assert found.share == pytest.approx(found.least, abs=2e-3) and found.least == (stages - 1) / (micros + stages - 1)
    few = [min(micros, stages - r % stages) if isinstance(schedule, OneFOneB) else micros for r in range(4)]
    assert found.in_flight.tolist() == few
    assert "longest" not in found.text and "Rank" not in found.text


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8)])
def test_zero_bubble_idles_for_a_third(stages: int, micros: int) -> None:
    found = measure_bubble(simulated(4, partition=Pipeline(stages=stages, micros=micros, schedule=ZeroBubble())))
    assert found is not None and found.least == (stages - 1) / (3 * micros + stages - 1)
    assert found.share == pytest.approx(found.least, abs=2e-3)
    assert found.in_flight.tolist() == [min(micros, stages)] * 4, "kept until the second half is done"


@pytest.mark.parametrize(("schedule", "stages", "micros"), [
    (PipeDream(), 2, 1), (PipeDream(), 4, 1), (PipeDream2BW(), 2, 2), (PipeDream2BW(), 4, 4), (PipeDream2BW(), 4, 8),
])  # fmt: skip
def test_schedules_without_flush_do_not_idle(schedule: Any, stages: int, micros: int) -> None:
    """1F1B with as many micro-batches must idle. A tolerance covers the links' time."""
    way = Pipeline(stages=stages, micros=micros, schedule=schedule)
    found = measure_bubble(simulated(4, EQUAL, 30, partition=way))
    assert found is not None and (found.stages, found.micros, found.flushes) == (stages, micros, False)
    assert found.share == pytest.approx(0.0, abs=2e-3) and found.least == 0.0
    assert found.in_flight.tolist() == [stages - r % stages for r in range(4)]
    assert "never drain" in found.text and "longest" not in found.text
    flushed = measure_bubble(simulated(4, EQUAL, 30, partition=Pipeline(stages=stages, micros=micros)))
    assert flushed is not None and flushed.share == pytest.approx((stages - 1) / (micros + stages - 1), abs=2e-3)
    slow = measure_bubble(simulated(4, EQUAL, 30, partition=way, fabric=Fabric(link=Link(latency=5.0))))
    assert slow is not None and slow.share > 0.02


def test_several_batches_in_a_step_are_not_in_flight_together() -> None:
    found = measure_bubble(simulated(4, partition=Pipeline(), strategy=DDP(accumulate=3)))
    assert found is not None and found.in_flight.tolist() == [2, 1, 2, 1]


def test_a_stage_of_two_ranks_idles_like_one_rank() -> None:
    """The time that ranks of a stage wait for each other inside a pass is no bubble."""
    way = Pipeline(stages=2, micros=4, of=Tensor())
    link = Fabric(link=Link(bandwidth=1000.0, latency=0.05))  # its messages between stages take time, too
    for fabric in (Fabric(), link):
        found = measure_bubble(simulated(8, partition=way, fabric=fabric))
        assert found is not None and (found.stages, found.slices, found.micros) == (2, 2, 4)
        assert found.share == pytest.approx(found.least, abs=2e-3 if fabric != link else 0.05)
        assert found.in_flight.tolist() == [2, 2, 1, 1] * 2 and "by stage" in found.text and "2, 1 micro" in found.text


def test_the_slow_rank_of_a_stage_of_two_is_named() -> None:
    """The slow rank delays its partner, whose passes take as long. The report may name either, but no rank of another
    stage.
    """
    way, slow = Pipeline(stages=2, micros=4, of=Tensor()), Fabric(faults=(Slow(rank=2, factor=2.0),))
    found = measure_bubble(simulated(8, partition=way, fabric=slow))
    assert found is not None and ("Rank 2 takes" in found.text or "Rank 3 takes" in found.text)


def test_interleaved_pieces_shrink_the_bubble() -> None:
    widths = (WIDTH,) * 8
    found = measure_bubble(simulated(4, widths, partition=Pipeline(stages=4, micros=8, schedule=Interleaved())))
    assert found is not None and (found.stages, found.micros, found.pieces) == (4, 8, 2)
    assert found.least == 3 / 19 and found.share == pytest.approx(found.least, abs=3e-3)
    assert found.in_flight.tolist() == [11, 9, 7, 5], "as measured of torch's own Interleaved1F1B"
    assert "8 micro-batches through 2 pieces each" in found.text


def test_the_longest_stage_is_named() -> None:
    found = measure_bubble(simulated(4, (WIDTH, WIDTH, 3 * WIDTH, WIDTH), partition=Pipeline(stages=4, micros=8)))
    assert found is not None and found.share > found.least + 0.1
    assert "Stage 2 takes longest, 2.0 times the mean" in found.text


def test_a_rank_slower_than_its_stage_is_named() -> None:
    slow = Fabric(faults=(Slow(rank=3, factor=2.0),))
    found = measure_bubble(simulated(6, partition=Pipeline(), fabric=slow))
    assert found is not None
    assert "Rank 3 takes 2.0 times what is usual for its stage (rank 1, 5)" in found.text


def test_the_report_covers_only_pipelined_steps_since_the_change() -> None:
    changes = Change(4, "partition", Pipeline()), Change(8, "partition", Whole())
    whole, cut = simulated(4, EQUAL, 12, *changes), simulated(4, EQUAL, 8, *changes[:1])
    assert measure_bubble(whole) is None and why_silent(whole) != "stages"
    assert measure_bubble(cut) is not None
    assert find_straggler(cut) is None and why_silent(cut) == "stages", (
        "stages are unlike, which makes none a straggler"
    )


def test_the_timeline_numbers_micro_batches_in_all_three_passes() -> None:
    done = simulate(piped(4, 3, pace=50.0, partition=Pipeline(stages=2, micros=4, schedule=ZeroBubble())))
    named = {name["name"]: name["short"] for name in Timeline().update(done).facts["names"]}
    assert {named[f"{phase} 3"][1] for phase in ("forward", "backward", "backward weights")} == {"F3", "B3", "W3"}
