"""Tests the view of memory over steps: shown once memory changes, equal to the record, at once or in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.synthetic import run as recorded
from widgets.views._base import Patch
from widgets.views.peaks import Peaks
from workbench import LocalSGD, simulate
from workbench.experiment import Experiment
from workbench.record.timeline import Sample
from workbench.run import Run
from workbench.settings import Change
from workbench.tasks import Digits


def at(patches: list[Patch], rank: int, steps: list[int]) -> list[float]:
    """Returns the values of this rank's line at these steps."""
    x, y = (np.concatenate([p.append[rank][k] for p in patches if rank in p.append]) for k in ("x", "y"))
    assert (np.diff(x) >= 0).all()
    return [float(y[np.searchsorted(x, step, "right") - 1]) for step in steps]


def grown() -> list[Sample]:
    """Returns samples of rank 1: larger memory at step 10, the old value at step 15."""
    return [Sample(1, 10, "memory peak", 1.0, 8e7), Sample(1, 15, "memory peak", 2.0, 5e7)]


def test_a_step_shows_its_largest_sample_and_later_steps_its_last_one() -> None:
    run = Run({"ranks": 1})
    told = [(0, 3e7), (5, 1e7), (5, 3e7), (9, 1e7), (9, 6e7), (9, 4e7), (10, 2e7), (10, 5e7)]
    run.timeline.samples.add([Sample(0, step, "memory peak", float(step), value) for step, value in told])
    run.timeline.samples.add([Sample(0, 14, "loss", 14.0, 1.0)])
    patch = Peaks().update(run)
    assert at([patch], 0, [0, 4, 5, 6, 8, 9, 10, 11, 14]) == [3e7] * 5 + [6e7, 5e7, 5e7, 5e7]
    assert min(patch.append[0]["y"]) == 3e7, "nothing dips in which nothing was less"
    level = Run({"ranks": 1})
    level.timeline.samples.add([Sample(0, step, "memory peak", float(step), value) for step, value in told[:3]])
    assert not Peaks().update(level)


def test_a_line_per_rank_has_the_records_value_at_every_step() -> None:
    run = recorded(steps=20, ranks=2, changes=())
    rows = run.timeline.samples.rows()
    (first,) = rows.value[rows.equal("name", "memory peak") & (rows.rank == 1)]
    run.timeline.samples.add(grown())
    patch = Peaks().update(run)
    assert at([patch], 1, [0, 9, 10, 14, 15, 19]) == [first, first, 8e7, 8e7, 5e7, 5e7]
    assert at([patch], 0, [0, 19]) == [first, first] and max(patch.append[0]["x"]) >= 19
    grid = Peaks().table(run)
    assert grid is not None and grid.rows[-2:] == [(1, 10, "80 MB"), (1, 15, "50 MB")]


def test_the_view_appears_once_memory_changes_and_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widgets.views.peaks.UPDATE_INTERVAL", 0.0)
    whole = recorded(steps=20, ranks=2, changes=()).timeline.samples.rows()
    live, view = Run({"ranks": 2}, live=True), Peaks()
    live.timeline.samples.extend(whole[whole.step < 10].columns)
    assert not view.update(live)
    patches = []
    live.timeline.samples.add(grown()[:1])
    patches.append(view.update(live))
    live.timeline.samples.extend(whole[whole.step >= 10].columns)
    live.timeline.samples.add(grown()[1:])
    patches.append(view.update(live))
    live.live = False
    live.timeline.samples.add([Sample(rank, 19, "loss", 3.0, 1.0) for rank in (0, 1)])
    patches.append(view.update(live))
    assert at(patches, 1, [10, 14, 15, 19]) == [8e7, 8e7, 5e7, 5e7]
    assert at(patches, 0, [0]) == at(patches, 0, [19])


@pytest.mark.ranks
def test_a_larger_batch_shows_at_its_step() -> None:
    e = Experiment(task=Digits(width=32), ranks=2, steps=12, pace=5.0, batch=16, strategy=LocalSGD(every=2))
    run = simulate(e, changes=[Change(6, "batch", 64)])
    before, after = at([Peaks().update(run)], 0, [5, 7])
    assert after > before
