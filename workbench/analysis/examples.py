"""How many examples are trained on in a second."""

from __future__ import annotations

import numpy as np

from workbench.analysis.window import Window
from workbench.record.timeline import Timeline


def examples_per_second(tl: Timeline, first: int, stop: int) -> float | None:
    """EPS of all ranks together in steps [first, stop): of each the examples of its steps over their time, added up.

    Evaluations and hand-overs between steps do not count, and steps in which something was measured neither. None where
    the record does not say how many examples a step has: those of a task that makes batches of its own, or of old runs.
    """
    w = Window(tl, first, stop)
    samples = tl.samples.rows()
    said = samples[samples.equal("name", "examples")] if len(samples) else samples
    if not len(said):
        return None
    seconds = np.where(w.measured[:, None], np.nan, w.step_seconds)
    total = 0.0
    for column, rank in enumerate(w.ranks):
        mine, made = said[said.rank == rank], ~np.isnan(seconds[:, column])
        if len(mine) and made.any():
            since = np.searchsorted(mine.step, w.steps[made], side="right") - 1
            count = np.where(since >= 0, mine.value[since.clip(0)], 0.0)
            total += count.sum() / seconds[made, column].sum()
    return total
