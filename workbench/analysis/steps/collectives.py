"""Lines collectives up across ranks.

The k-th communication span with a name in a step is the same collective on every rank. Data move after the last rank's
arrival.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.window import Window
from workbench.record.timeline import Rows, Timeline


class Arrivals(NamedTuple):
    """A row per collective, a column per rank. NaN for a missing span."""

    ranks: np.ndarray  # (p,)
    step: np.ndarray  # (c,)
    name: np.ndarray  # (c,) names
    asked: np.ndarray  # (c, p) each rank's request
    t0: np.ndarray  # (c, p) each rank's arrival
    t1: np.ndarray  # (c, p) its end on each rank
    nbytes: np.ndarray  # (c, p) bytes sent
    port: np.ndarray  # (c, p) seconds that the rank's own port was busy; NaN without a Link

    @property
    def last(self) -> np.ndarray:
        """`(c,)` the last arrival."""
        out: np.ndarray = np.fmax.reduce(self.t0, axis=1) if len(self.t0) else np.empty(0)
        return out

    @property
    def full(self) -> np.ndarray:
        """`(c,)` whether all ranks' spans are known."""
        out: np.ndarray = ~np.isnan(self.t0).any(axis=1)
        return out

    @property
    def waiting(self) -> np.ndarray:
        """`(c, p)` seconds each rank waited for the last arrival."""
        out: np.ndarray = np.minimum(self.last[:, None], self.t1) - self.t0
        return out.clip(min=0)

    @property
    def transferring(self) -> np.ndarray:
        """`(c, p)` seconds from the last arrival to the end."""
        out: np.ndarray = self.t1 - np.maximum(self.last[:, None], self.t0)
        return out.clip(min=0)

    @property
    def late(self) -> np.ndarray:
        """`(c, p)` seconds from the other ranks' median arrival (negative: before)."""
        return against_others(self.t0)


def line_up(tl: Timeline, first: int, stop: int) -> Arrivals:
    """Returns the collectives of steps `[first, stop)`, by last arrival."""
    return lined_up(Window(tl, first, stop))


def lined_up(w: Window, lane: str = "comm", *, outside: bool = False) -> Arrivals:
    """`line_up` for a window, without messages.

    outside: includes evaluations and hand-overs
    """
    rows, ports = w.lane(lane), w.lane("port")
    if not outside:
        rows, ports = rows[~w.is_outside(rows)], ports[~w.is_outside(ports)]
    rows = rows[~is_message(rows)]
    key, first, inverse = np.unique(_make_keys(rows), return_index=True, return_inverse=True)
    c, p = len(key), len(w.ranks)
    where = inverse, w.column_of(rows.rank)
    asked, t0, t1, port = (np.full((c, p), np.nan) for _ in range(4))
    nbytes = np.zeros((c, p), np.int64)
    asked[where], t0[where], t1[where], nbytes[where] = rows.asked, rows.t0, rows.t1, rows.nbytes
    if len(ports):
        portkey = _make_keys(ports)
        at = np.minimum(np.searchsorted(key, portkey), max(c - 1, 0))
        known = (key[at] == portkey) if c else np.zeros(len(ports), bool)
        port[at[known], w.column_of(ports.rank)[known]] = (ports.t1 - ports.t0)[known]
    found = Arrivals(w.ranks, rows.step[first], rows.name[first], asked, t0, t1, nbytes, port)
    order = np.argsort(found.last, kind="stable")
    return Arrivals(w.ranks, *(column[order] for column in found[1:]))


def is_message(rows: Rows) -> np.ndarray:
    """Returns a mask over `rows`: messages between 2 ranks."""
    names = rows.coded("name")
    kinds = np.array([str(text).startswith("send") for text in names.words.texts], bool)
    return kinds[names.codes] if len(names) else np.zeros(0, bool)


def last_arrivals(tl: Timeline, rows: Rows) -> np.ndarray:
    """`last_arrival` for a timeline's rows, also in evaluations and hand-overs."""
    if not len(rows):
        return np.empty(0)
    w = Window(tl, int(rows.step.min()), int(rows.step.max()) + 1)
    return last_arrival(rows, lined_up(w, outside=True))


def last_arrival(rows: Rows, c: Arrivals) -> np.ndarray:
    """`(n,)` last arrivals at each row's collective, or NaN."""
    out, comm = np.full(len(rows), np.nan), rows.equal("lane", "comm")
    last = c.last
    for column, rank in enumerate(c.ranks):
        mine = np.flatnonzero(comm & (rows.rank == rank))
        order = np.argsort(c.t0[:, column])
        begin = c.t0[order, column]
        if len(mine) and len(begin):
            at = np.minimum(np.searchsorted(begin, rows.t0[mine]), len(begin) - 1)
            out[mine] = np.where(begin[at] == rows.t0[mine], last[order[at]], np.nan)
    return out


def moving_since(rows: Rows, last: np.ndarray) -> np.ndarray:
    """`(n,)` when each row's data began to move: in a collective, at the last arrival."""
    out: np.ndarray = np.fmax(rows.t0, np.fmin(last, rows.t1))
    return out


def send_rates(rows: Rows, last: np.ndarray) -> np.ndarray:
    """`(n,)` Mbit/s at which each row sent its own bytes, without waits. NaN for other rows.

    last: from `last_arrival`
    """
    seconds = rows.t1 - moving_since(rows, last)
    sent = (rows.nbytes > 0) & (seconds > 0)
    return np.divide(rows.nbytes * 8e-6, seconds, out=np.full(len(rows), np.nan), where=sent)


def against_others(values: np.ndarray) -> np.ndarray:
    """Subtracts from each value its row's median of the other columns."""
    if values.shape[1] < 2:
        return np.zeros_like(values)
    return np.asarray(values - of_others(values))


def of_others(values: np.ndarray) -> np.ndarray:
    """`(..., p)`: each value's median of the other values, or NaN.

    Without one of n sorted values, the middle moves by one for the values before it.

    >>> of_others(np.array([1.0, 2.0, 4.0, 8.0])).tolist()
    [4.0, 4.0, 2.0, 2.0]
    """
    n = values.shape[-1]
    order = np.argsort(values, axis=-1, kind="stable")  # NaN last
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(n), order.shape), axis=-1)
    ordered, low, high = np.take_along_axis(values, order, axis=-1), (n - 2) // 2, (n - 1) // 2
    middle = [np.where(place <= k, ordered[..., k + 1, None], ordered[..., k, None]) for k in (low, high)]
    missing = np.isnan(values)
    others = missing.sum(axis=-1, keepdims=True) - missing
    return np.where(others > 0, np.nan, middle[0] if low == high else (middle[0] + middle[1]) / 2)


def _make_keys(rows: Rows) -> np.ndarray:
    """Returns a number per span, equal on all ranks. It encodes step, name and occurrence."""
    name = rows.coded("name").codes.astype(np.int64)
    step, n = rows.step.astype(np.int64), len(rows)
    if not n:
        return np.empty(0, np.int64)
    order = np.lexsort((rows.t0, name, step, rows.rank))
    group = np.stack([rows.rank[order], step[order], name[order]])
    fresh = np.ones(n, bool)
    fresh[1:] = (group[:, 1:] != group[:, :-1]).any(axis=0)
    begin = np.maximum.accumulate(np.where(fresh, np.arange(n), 0))
    occurrence = np.empty(n, np.int64)
    occurrence[order] = np.arange(n) - begin
    return (step << 40) | (name << 16) | occurrence
