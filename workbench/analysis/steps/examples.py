"""Counts the examples that ranks train on."""

from __future__ import annotations

import json

import numpy as np

from workbench.analysis.steps.window import Window, newest_generation, ranks_of
from workbench.record.timeline import Timeline


def examples_per_second(tl: Timeline, first: int, stop: int) -> float | None:
    """Returns all ranks' examples per second in steps `[first, stop)`.

    Excludes evaluations, hand-overs and steps with measurements. None if unrecorded: an old run, or a task that makes
    its own batches.
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


def examples_made(tl: Timeline, steps: np.ndarray) -> np.ndarray:
    """Returns `(n,)` examples of all ranks by each step's end, from the first of `steps`. Empty if unrecorded."""
    samples = tl.samples.rows()
    said = samples[samples.equal("name", "examples")] if len(samples) else samples
    if not len(said) or not len(steps):
        return np.empty(0)
    each = np.zeros(len(steps))
    for rank in np.unique(said.rank):
        mine = said[said.rank == rank]
        since = np.searchsorted(mine.step, steps, side="right") - 1
        each += np.where(since >= 0, mine.value[since.clip(0)], 0.0)
    return np.cumsum(each)


def recent_steps(tl: Timeline, last: int) -> tuple[int, int]:
    """Returns `[first, stop)` of the training ranks' last `last` steps, which may differ."""
    rows = tl.spans.rows()
    ended = rows[rows.equal("lane", "step")] if len(rows) else rows
    if (since := newest_generation(tl)) is not None:
        ended = ended[np.isin(ended.rank, since.members) & (ended.t0 >= since.t)]
    furthest = {int(rank): int(ended.step[ended.rank == rank].max()) for rank in ranks_of(ended)}
    for rank in serving_ranks(tl):
        furthest.pop(rank, None)
    if not furthest:
        return 0, 0
    return max(0, min(furthest.values()) + 1 - last), max(furthest.values()) + 1


def serving_ranks(tl: Timeline) -> list[int]:
    """Returns the ranks that serve at the record's end, without a later step."""
    rows, marks = tl.spans.rows(), tl.marks.rows()
    for at in np.flatnonzero(marks.equal("name", "roles"))[-1:] if len(marks) else ():
        ended = rows[rows.equal("lane", "step") & (rows.step >= marks.step[at])] if len(rows) else rows
        since = newest_generation(tl)
        serve = json.loads(marks.detail[at])["serve"]
        if since is not None and marks.t[at] >= since.t:  # `serve` holds places, not ids
            serve = [since.members[place] for place in serve if place < len(since.members)]
        return [rank for rank in serve if not (ended.rank == rank).any()]
    return []
