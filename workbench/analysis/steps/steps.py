"""Where the time of a step went, rank by rank: durations, shares, bytes, overlap."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.collectives import Arrivals, lined_up
from workbench.analysis.steps.cover import Cover, by_rank
from workbench.analysis.steps.window import Window, last_steps
from workbench.record.timeline import Timeline

PHASES = ("forward", "backward", "update")


class StepTimes(NamedTuple):
    """How long each step lasted on each rank; NaN where it has not ended."""

    ranks: np.ndarray  # (p,)
    steps: np.ndarray  # (n,)
    seconds: np.ndarray  # (n, p)


class Breakdown(NamedTuple):
    """Mean seconds per step on each rank, over the steps that ended everywhere; measuring is left out.

    A step is compute + exposed + other. Exposed communication is what the step stood still for; of it,
    `held` was spent before the last rank had arrived, and in `packing` the rank itself encoded or decoded meanwhile.
    `waiting`, `transferring` and `codec` count all communication, also what hid behind compute.
    """

    ranks: np.ndarray
    steps: int  # how many steps the means are over
    seconds: np.ndarray
    compute: np.ndarray
    exposed: np.ndarray
    held: np.ndarray
    packing: np.ndarray
    waiting: np.ndarray
    transferring: np.ndarray
    codec: np.ndarray
    other: np.ndarray


class Overlap(NamedTuple):
    """Communication against compute, in seconds per rank over a window."""

    ranks: np.ndarray
    communication: np.ndarray
    hidden: np.ndarray  # of it, while the rank computed
    exposed: np.ndarray  # of it, while it did not
    behind: dict[str, np.ndarray]  # of what is hidden, behind forward, backward and update

    @property
    def share(self) -> np.ndarray:
        """Hidden communication as a share of all; NaN without any."""
        out = np.full(len(self.ranks), np.nan)
        np.divide(self.hidden, self.communication, out=out, where=self.communication > 0)
        return out


class Row(NamedTuple):
    """One rank in the data table beside the charts; milliseconds and bytes are means per step."""

    rank: int
    steps: int
    step_ms: float
    compute_ms: float
    exposed_ms: float
    waiting_ms: float
    transferring_ms: float
    nbytes: float
    loss: float  # training loss of its last step here


def step_times(tl: Timeline, last: int | None = None, before: int | None = None) -> StepTimes:
    """Duration of each of the last steps (None: of all) that have ended on every rank, `before` a step."""
    w = Window(tl, *last_steps(tl, last, before))
    return StepTimes(w.ranks, w.steps, w.step_seconds)


def breakdown(tl: Timeline, first: int, stop: int) -> Breakdown:
    """Where the time of steps [first, stop) went."""
    return broken_down(Window(tl, first, stop))


def broken_down(w: Window, only: np.ndarray | None = None) -> Breakdown:
    """As `breakdown`, for a window; `only` is a mask over its steps."""
    over = w.usual if only is None else w.usual & only
    c = lined_up(w)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.asarray(values[over].mean(axis=0)) if over.any() else np.zeros(len(w.ranks))

    seconds, compute, exposed = mean(w.step_seconds), mean(w.seconds("compute")), mean(w.seconds("wait"))
    other = np.clip(seconds - compute - exposed, 0, None)
    return Breakdown(
        w.ranks, int(over.sum()), seconds, compute, exposed, mean(_by_step(w, c, held(w, c))), mean(packing(w)),
        mean(_by_step(w, c, c.waiting)), mean(_by_step(w, c, c.transferring)), mean(w.seconds("codec")), other,
    )


def held(w: Window, c: Arrivals) -> np.ndarray:
    """(c, p) seconds of each collective that a rank's step stood still before the last rank had arrived."""
    out = np.zeros(c.t0.shape)
    for i, rank in enumerate(w.ranks):
        still, begin = w.cover(rank, "wait"), np.nan_to_num(c.t0[:, i])
        end = np.fmin(c.last, c.t1[:, i])
        out[:, i] = np.where(end > begin, still.between(begin, np.nan_to_num(end)), 0.0)
    return out


def packing(w: Window) -> np.ndarray:
    """(steps, ranks) seconds of encoding and decoding while the rank's own step stood still."""
    rows = w.lane("codec")
    rows = rows[~w.outside(rows)]
    shown = np.zeros(len(rows))
    for rank, mine in by_rank(rows.rank):
        shown[mine] = w.cover(rank, "wait").between(rows.t0[mine], rows.t1[mine])
    return w.total(rows, shown)


def overlap(tl: Timeline, first: int, stop: int) -> Overlap:
    """How much communication hid behind compute: unions of intervals, so nothing counts twice."""
    w = Window(tl, first, stop)
    comm, hidden = np.zeros(len(w.ranks)), np.zeros(len(w.ranks))
    behind = {phase: np.zeros(len(w.ranks)) for phase in PHASES}
    rows = w.lane("comm")
    rows = rows[~w.outside(rows)]
    phases = {phase: w.lane("compute", name=phase) for phase in PHASES}
    for i, rank in enumerate(w.ranks):
        mine = rows.rank == rank
        cover = Cover(rows.t0[mine], rows.t1[mine])
        comm[i] = cover.length
        hidden[i] = w.cover(rank, "compute").between(cover.begin, cover.end).sum()
        for phase, spans in phases.items():
            own = spans.rank == rank
            behind[phase][i] = Cover(spans.t0[own], spans.t1[own]).between(cover.begin, cover.end).sum()
    return Overlap(w.ranks, comm, hidden, comm - hidden, behind)


def bytes_per_step(tl: Timeline, first: int, stop: int) -> np.ndarray:
    """(steps, ranks) bytes that each rank sent in each step; hand-overs, evaluations and measuring are left out."""
    w = Window(tl, first, stop)
    rows = w.lane("comm")
    rows = rows[~w.outside(rows)]
    return w.total(rows, rows.nbytes)


def sendings(sent: np.ndarray, first: int, before: int) -> tuple[np.ndarray, np.ndarray]:
    """(steps in which a rank sent something, bytes per step: the mean over the steps since it sent before).

    sent: (n,) bytes in each step from `first` on; before: the last step before them in which it sent, or -1
    """
    steps = first + np.flatnonzero(sent)
    return steps, sent[steps - first] / np.diff(steps, prepend=before)


def per_rank(tl: Timeline, first: int, stop: int) -> list[Row]:
    """The data table beside the charts: one row per rank."""
    w = Window(tl, first, stop)
    b, n = broken_down(w), int(w.usual.sum())
    rows = w.lane("comm")
    nbytes = w.total(rows, np.where(w.outside(rows), 0, rows.nbytes))[w.usual]
    sent = nbytes.mean(axis=0).tolist() if n else [0.0] * len(w.ranks)
    times = (b.seconds, b.compute, b.exposed, b.waiting, b.transferring)
    columns = *(np.round(seconds * 1e3, 3).tolist() for seconds in times), sent, _losses(tl, w)
    return [Row(int(r), n, *values) for r, *values in zip(w.ranks, *columns, strict=True)]


def _losses(tl: Timeline, w: Window) -> list[float]:
    """The newest training loss of each rank before the window ends."""
    rows = tl.samples.rows()
    rows = rows[rows.equal("name", "loss") & (rows.step >= w.first) & (rows.step < w.stop)] if len(rows) else rows
    newest = {int(r): float(v) for r, v in zip(rows.rank, rows.value, strict=True)}
    return [newest.get(int(r), float("nan")) for r in w.ranks]


def _by_step(w: Window, c: Arrivals, values: np.ndarray) -> np.ndarray:
    """(steps, ranks): a (collectives, ranks) matrix added up per step; NaN counts nothing."""
    out = np.zeros(w.shape)
    np.add.at(out, c.step - w.first, np.nan_to_num(values))
    return out
