"""The comparable steps on one side of a change.

Excludes steps after a beginning, change, re-bucketing or pause. Excludes steps next to an evaluation, a hand-over or a
measurement. A periodic strategy's whole rounds spread a meeting's cost; an evaluation in them hardly matters.
"""

from __future__ import annotations

import json

import numpy as np

from workbench.analysis.compare.clear_difference import why_few
from workbench.analysis.steps.collectives import lined_up
from workbench.analysis.steps.window import Window, change_steps, last_steps
from workbench.record.timeline import Timeline

SETTLE_STEPS = 2  # steps after a beginning, a change or new buckets
WINDOW_STEPS = 50  # steps to analyse
WIDER = (1, 4, 40)  # windows to try for enough rounds
MIN_UNDISTURBED = 4  # if fewer than 1 in 4 steps is undisturbed, all steps count


class Side:
    """Steps `[first, stop)` of one side. It has a value per step, or per round of a periodic strategy.

    begins: a round's first step
    lacks:  why there is no verdict, or ""
    """

    def __init__(self, tl: Timeline, first: int, stop: int, begins: int) -> None:
        self.steps = first, stop
        self.window = w = Window(tl, first, stop)
        c = lined_up(w)
        meetings = np.unique(c.step[c.full])
        self.periodic = 0 < len(meetings) < w.complete.sum() - 1
        self._rounds = _number_rounds(w, meetings, begins) if self.periodic else np.where(w.complete, w.steps, -1)
        self.settled = ~unsettled_steps(tl, w)
        self._kept = self._list_comparable()
        self.n = int(np.isin(self._rounds, self._kept).sum())
        seen = len(np.unique(self._rounds[self._rounds >= 0]))
        self.lacks = why_few(len(self._kept), self.n, rounds=self.periodic, seen=seen)
        rows = w.lane("comm")
        self.nbytes = self.average_each(w.sum_rows(rows, np.where(w.is_outside(rows), 0, rows.nbytes)))
        self.seconds, self.exposed = self.average_each(w.step_seconds), self.average_each(w.seconds("wait"))

    def average_each(self, values: np.ndarray) -> np.ndarray:
        """`(n,)` means of a `(steps, ranks)` matrix, per used step or round."""
        return np.array([values[self._rounds == k].mean() for k in self._kept])

    def _list_comparable(self) -> np.ndarray:
        every = np.unique(self._rounds[self._rounds >= 0])
        settled = np.setdiff1d(every, self._rounds[~self.settled])
        if self.periodic:
            return settled
        clean = np.setdiff1d(settled, self._rounds[self.window.disturbed])
        return clean if MIN_UNDISTURBED * len(clean) >= len(settled) else settled


def side_before(tl: Timeline, stop: int, floor: int, window: int = WINDOW_STEPS) -> Side:
    """Returns the last steps before `stop`, none before `floor`. Returns more for long rounds."""
    for wide in WIDER:
        first = max(stop - wide * window, floor)
        side = Side(tl, first, stop, begins=floor)
        if not side.lacks or first == floor:
            break
    return side


def side_after(tl: Timeline, first: int, ceiling: int, window: int = WINDOW_STEPS) -> Side:
    """Returns the first steps from `first` to `ceiling`; more for long rounds."""
    for wide in WIDER:
        stop = min(first + 1 + wide * window, ceiling)
        side = Side(tl, first, stop, begins=first)
        if not side.lacks or stop == ceiling:
            break
    return side


def unsettled_steps(tl: Timeline, w: Window) -> np.ndarray:
    """Returns a mask of steps just after a beginning, change, new buckets or pause."""
    marks, begun = tl.marks.rows(), last_steps(tl)[0]
    new = marks.step[marks.equal("name", "buckets")] if len(marks) else np.empty(0, np.int64)
    fresh = np.concatenate([[begun], change_steps(tl), new])[:, None] + np.arange(SETTLE_STEPS)
    return np.isin(w.steps, np.concatenate([fresh.ravel(), _stalled_steps(tl)]))


def _stalled_steps(tl: Timeline) -> np.ndarray:
    rows = tl.marks.rows()
    if not len(rows):
        return np.empty(0, np.int64)
    said = rows[rows.equal("name", "state")]
    paused = [int(s) for s, d in zip(said.step, said.detail, strict=True) if json.loads(d).get("state") == "paused"]
    return np.concatenate([np.array(paused, np.int64), rows.step[rows.equal("name", "fault")]])


def _number_rounds(w: Window, meetings: np.ndarray, begins: int) -> np.ndarray:
    """Returns `(steps,)` rounds. -1: unfinished or begun before the window."""
    at = np.searchsorted(meetings, w.steps)
    whole = (at < len(meetings)) & ((at > 0) | (begins == w.first))
    rounds = np.where(whole, at, -1)
    broken = np.unique(rounds[~w.complete])
    return np.where(np.isin(rounds, broken), -1, rounds)
