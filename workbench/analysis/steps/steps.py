"""Splits a step's time on each rank: durations, shares, bytes and overlap."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.collectives import Arrivals, lined_up
from workbench.analysis.steps.cover import Cover, by_rank
from workbench.analysis.steps.window import Window, last_steps
from workbench.record.timeline import Timeline

PHASES = ("forward", "backward", "update")


class StepTimes(NamedTuple):
    """Each step's seconds on each rank. NaN if it has not ended."""

    ranks: np.ndarray  # (p,)
    steps: np.ndarray  # (n,)
    seconds: np.ndarray  # (n, p)


class Breakdown(NamedTuple):
    """Mean seconds per step on each rank, over steps without measurements that ended on all ranks.

    A step is compute + exposed + other. `exposed` communication stalls the step: `held` before the last rank arrived,
    `packing` while the rank itself encoded or decoded. `waiting`, `transferring` and `codec` include the part behind
    compute.
    """

    ranks: np.ndarray
    steps: int  # in the means
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
    """Communication against compute, in seconds per rank."""

    ranks: np.ndarray
    communication: np.ndarray
    hidden: np.ndarray  # the part during compute
    exposed: np.ndarray  # the part outside of compute
    behind: dict[str, np.ndarray]  # the hidden part, by forward, backward and update

    @property
    def share(self) -> np.ndarray:
        """Hidden over all communication, or NaN."""
        out = np.full(len(self.ranks), np.nan)
        np.divide(self.hidden, self.communication, out=out, where=self.communication > 0)
        return out


class RankRow(NamedTuple):
    """One rank in the data table: means per step, in ms and bytes."""

    rank: int
    steps: int
    step_ms: float
    compute_ms: float
    exposed_ms: float
    waiting_ms: float
    transferring_ms: float
    nbytes: float
    loss: float  # training loss of its last step in the window


def step_times(tl: Timeline, last: int | None = None, before: int | None = None) -> StepTimes:
    """Returns durations of the last `last` steps (None: all), up to step `before`."""
    w = Window(tl, *last_steps(tl, last, before))
    return StepTimes(w.ranks, w.steps, w.step_seconds)


def break_down(tl: Timeline, first: int, stop: int) -> Breakdown:
    """Splits the time of steps `[first, stop)` on each rank."""
    return broken_down(Window(tl, first, stop))


def broken_down(w: Window, only: np.ndarray | None = None) -> Breakdown:
    """`break_down` for a window. only: a mask over its steps"""
    over = w.usual if only is None else w.usual & only
    c = lined_up(w)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.asarray(values[over].mean(axis=0)) if over.any() else np.zeros(len(w.ranks))

    seconds, compute, exposed = mean(w.step_seconds), mean(w.seconds("compute")), mean(w.seconds("wait"))
    other = np.clip(seconds - compute - exposed, 0, None)
    return Breakdown(
        w.ranks,
        int(over.sum()),
        seconds,
        compute,
        exposed,
        mean(_by_step(w, c, held_seconds(w, c))),
        mean(packing_seconds(w)),
        mean(_by_step(w, c, c.waiting)),
        mean(_by_step(w, c, c.transferring)),
        mean(w.seconds("codec")),
        other,
    )


def held_seconds(w: Window, c: Arrivals) -> np.ndarray:
    """`(c, p)` seconds of stall before the last arrival."""
    out = np.zeros(c.t0.shape)
    for i, rank in enumerate(w.ranks):
        still, begin = w.cover(rank, "wait"), np.nan_to_num(c.t0[:, i])
        end = np.fmin(c.last, c.t1[:, i])
        out[:, i] = np.where(end > begin, still.length_between(begin, np.nan_to_num(end)), 0.0)
    return out


def packing_seconds(w: Window) -> np.ndarray:
    """`(steps, ranks)` seconds of packing that stalled the rank's own step."""
    rows = w.lane("codec")
    rows = rows[~w.is_outside(rows)]
    shown = np.zeros(len(rows))
    for rank, mine in by_rank(rows.rank):
        shown[mine] = w.cover(rank, "wait").length_between(rows.t0[mine], rows.t1[mine])
    return w.sum_rows(rows, shown)


def measure_overlap(tl: Timeline, first: int, stop: int) -> Overlap:
    """Measures hidden communication. Overlapping spans count once."""
    w = Window(tl, first, stop)
    comm, hidden = np.zeros(len(w.ranks)), np.zeros(len(w.ranks))
    behind = {phase: np.zeros(len(w.ranks)) for phase in PHASES}
    rows = w.lane("comm")
    rows = rows[~w.is_outside(rows)]
    phases = {phase: w.lane("compute", name=phase) for phase in PHASES}
    for i, rank in enumerate(w.ranks):
        mine = rows.rank == rank
        cover = Cover(rows.t0[mine], rows.t1[mine])
        comm[i] = cover.total_length
        hidden[i] = w.cover(rank, "compute").length_between(cover.begin, cover.end).sum()
        for phase, spans in phases.items():
            own = spans.rank == rank
            behind[phase][i] = Cover(spans.t0[own], spans.t1[own]).length_between(cover.begin, cover.end).sum()
    return Overlap(w.ranks, comm, hidden, comm - hidden, behind)


def bytes_per_step(tl: Timeline, first: int, stop: int) -> np.ndarray:
    """`(steps, ranks)` bytes sent. Excludes hand-overs, evaluations and measurements."""
    w = Window(tl, first, stop)
    rows = w.lane("comm")
    rows = rows[~w.is_outside(rows)]
    return w.sum_rows(rows, rows.nbytes)


def sent_bytes(sent: np.ndarray, first: int, before: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps in which a rank sent, and bytes per step since the last.

    sent:   `(n,)` bytes in each step from `first` on
    before: the last earlier step in which it sent, or -1
    """
    steps = first + np.flatnonzero(sent)
    return steps, sent[steps - first] / np.diff(steps, prepend=before)


def per_rank(tl: Timeline, first: int, stop: int) -> list[RankRow]:
    """Returns the data table, a row per rank."""
    w = Window(tl, first, stop)
    b, n = broken_down(w), int(w.usual.sum())
    rows = w.lane("comm")
    nbytes = w.sum_rows(rows, np.where(w.is_outside(rows), 0, rows.nbytes))[w.usual]
    sent = nbytes.mean(axis=0).tolist() if n else [0.0] * len(w.ranks)
    times = (b.seconds, b.compute, b.exposed, b.waiting, b.transferring)
    columns = *(np.round(seconds * 1e3, 3).tolist() for seconds in times), sent, _last_losses(tl, w)
    return [RankRow(int(r), n, *values) for r, *values in zip(w.ranks, *columns, strict=True)]


def _last_losses(tl: Timeline, w: Window) -> list[float]:
    rows = tl.samples.rows()
    rows = rows[rows.equal("name", "loss") & (rows.step >= w.first) & (rows.step < w.stop)] if len(rows) else rows
    newest = {int(r): float(v) for r, v in zip(rows.rank, rows.value, strict=True)}
    return [newest.get(int(r), float("nan")) for r in w.ranks]


def _by_step(w: Window, c: Arrivals, values: np.ndarray) -> np.ndarray:
    out = np.zeros(w.shape)
    np.add.at(out, c.step - w.first, np.nan_to_num(values))
    return out
