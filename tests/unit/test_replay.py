"""Replays the collectives of a step: each rank's clock stands still while it waits for one."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.analysis.steps.collectives import lined_up
from workbench.analysis.steps.window import Window
from workbench.analysis.stragglers.blame import blame_ranks, measure_relief
from workbench.analysis.stragglers.replay import make_replay
from workbench.record.timeline import Span, Timeline

GATHERED = 3.0  # seconds of own time between the end of the gradients' exchange and the next request


def step(late: float, *, other: float = 0.0) -> Window:
    """Returns two collectives of a second each on three ranks, the second requested after the first has ended.

    late: seconds by which rank 2 is later for the first; other: a wait before it that no collective ended
    """
    tl, over = Timeline(), 5.0 + late
    for rank in range(3):
        asked, then = 4.0 + late * (rank == 2), over + GATHERED
        rows = [("wait", "input", 0.0, other)] * bool(other)
        rows += [("comm", "reduce_scatter bucket 0", asked, over), ("wait", "bucket 0", asked, over),
                 ("comm", "all_gather params 0", then, then + 1), ("wait", "params 0", then, then + 1),
                 ("step", "ZeRO1", 0.0, then + 1)]  # fmt: skip
        tl.spans.add(Span(rank, 0, lane, name, t0, t0, t1, 0) for lane, name, t0, t1 in rows)
    return Window(tl, 0, 1)


@pytest.mark.parametrize("other", [0.0, 1.5])
def test_an_unchanged_replay_ends_at_the_recorded_time(other: float) -> None:
    w = step(late=2.0, other=other)
    _, played = make_replay(w, lined_up(w), np.zeros((2, 3)))
    assert played is not None and played.find_ends().tolist() == pytest.approx([11.0])


@pytest.mark.parametrize("late", [0.0, 0.5, 2.0])
def test_a_rank_late_for_the_first_collective_also_delays_the_second(late: float) -> None:
    w = step(late)
    met, cost = blame_ranks(w, lined_up(w))
    assert met.tolist() == [0] and cost[0, 0] == pytest.approx([0, 0, late])
    assert measure_relief(w, lined_up(w), [2]) == pytest.approx([late])


def test_a_wait_that_no_collective_ended_keeps_its_duration() -> None:
    w = step(late=2.0, other=1.5)
    assert blame_ranks(w, lined_up(w))[1][0, 0, 2] == pytest.approx(2.0)
