"""The collectives of a step played again: each rank's clock stands still while it waits for one of them."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.analysis.steps.collectives import lined_up
from workbench.analysis.steps.window import Window
from workbench.analysis.stragglers.blame import blame, relief
from workbench.analysis.stragglers.replay import replay
from workbench.record.timeline import Span, Timeline

GATHERED = 3.0  # seconds of own time between the end of the gradients' exchange and what is asked for then


def step(late: float, *, other: float = 0.0) -> Window:
    """Two collectives of a second each on three ranks, the second asked for after the first has come.

    late: seconds by which rank 2 comes later to the first; other: a wait before, which no collective ends
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
def test_played_as_it_was_it_ends_when_it_ended(other: float) -> None:
    w = step(late=2.0, other=other)
    _, played = replay(w, lined_up(w), np.zeros((2, 3)))
    assert played is not None and played.end().tolist() == pytest.approx([11.0])


@pytest.mark.parametrize("late", [0.0, 0.5, 2.0])
def test_who_comes_late_to_the_first_puts_off_what_is_asked_once_it_has_come(late: float) -> None:
    w = step(late)
    met, cost = blame(w, lined_up(w))
    assert met.tolist() == [0] and cost[0, 0] == pytest.approx([0, 0, late])
    assert relief(w, lined_up(w), [2]) == pytest.approx([late])


def test_a_wait_that_no_collective_ended_stays_as_long() -> None:
    w = step(late=2.0, other=1.5)
    assert blame(w, lined_up(w))[1][0, 0, 2] == pytest.approx(2.0)
