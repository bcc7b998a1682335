"""Replays the collectives of a step, with a clock per rank.

Collective k begins when every rank is ready for it and collective k-1 is over,

    begin_k = max_r (max(asked_rk, end_{k-1}) + encode_rk),     end_k = begin_k + service_k

A rank requests k at moment own_rk of its own clock, which stops in waits. Let own_rw be the moment of an earlier wait w
that ended with collective j(w). Then

    asked_rk = own_rk + max(0, max_{w before k} (end_{j(w)} - own_rw))

So a gather of parameters is earlier if the gradients are. Some collectives follow one of the same bucket, such as
values after indices or a second hop. They count their own time from the end of the first one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.collectives import Arrivals, of_others
from workbench.analysis.steps.window import Window

MAX_REACTION = 1e-6  # seconds: a collective's end causes a request so soon

Stack = np.ndarray  # (meetings, collectives per meeting, ranks); NaN pads


class Replay(NamedTuple):
    """A replay's inputs: the collectives at all ranks' meetings, by last arrival."""

    own: Stack  # requests, by own clocks or after a chain's previous collective
    waited: Stack  # seconds of earlier stalls
    fixed: Stack  # waits among these that no collective of the meeting ended
    after: Stack  # int: the collective that ended the last wait, or -1
    woke: Stack  # that wait, by the own clock
    encode: Stack
    service: np.ndarray  # (meetings, collectives)
    slower: Stack  # seconds by which the port was busier than the other ranks'
    chained: np.ndarray  # (meetings, collectives) int: the same bucket's previous collective, or -1

    def as_usual(self, rest: np.ndarray | None = None) -> Replay:
        """As if no rank arrived or encoded later than the other ranks' median, or that of `rest`."""

        def of(values: Stack) -> Stack:
            others = of_others(values) if rest is None else np.median(values[:, :, rest], axis=2, keepdims=True)
            return np.fmin(values, others)

        return self._replace(own=of(self.own), woke=of(self.woke), encode=of(self.encode))

    def without_ranks(self, ranks: list[int], usual: Replay) -> Replay:
        """As if `ranks` (columns) arrived and encoded as in `usual`, with usual ports."""
        own, woke, encode = self.own.copy(), self.woke.copy(), self.encode.copy()
        for quick, mine in ((usual.own, own), (usual.woke, woke), (usual.encode, encode)):
            mine[:, :, ranks] = quick[:, :, ranks]
        spared = np.max(self.slower[:, :, ranks], axis=2)
        return self._replace(own=own, woke=woke, encode=encode, service=np.clip(self.service - spared, 0, None))

    def find_ends(self) -> np.ndarray:
        """Returns `(meetings,)` ends of the last collectives."""
        end, shift = np.full(len(self.own), -np.inf), np.zeros((len(self.own), self.own.shape[2]))
        ends = np.full(self.own.shape[:2], -np.inf)
        for k in range(self.own.shape[1]):
            woken = np.take_along_axis(ends, np.maximum(self.after[:, k], 0), axis=1) - self.woke[:, k]
            shift = np.fmax(np.where(self.after[:, k] >= 0, np.fmax(shift, woken), shift), self.fixed[:, k])
            chain = self.chained[:, k, None]
            known = np.where(chain >= 0, np.take_along_axis(ends, np.maximum(chain, 0), axis=1),
                             np.fmin(shift, self.waited[:, k]))  # fmt: skip
            begin = np.max(np.maximum(self.own[:, k] + known, end[:, None]) + self.encode[:, k], axis=1)
            ends[:, k] = end = np.where(np.isnan(begin), end, begin + self.service[:, k])
        return end


def make_replay(w: Window, c: Arrivals, slower: np.ndarray) -> tuple[np.ndarray, Replay | None]:
    """Returns the steps of all ranks' meetings, and their replay (None without meetings).

    slower: `(collectives, ranks)` seconds
    """
    full = np.flatnonzero(c.full)
    meetings, at = np.unique(c.step[full], return_inverse=True)
    if not len(meetings):
        return meetings, None
    place = _number_places(at)
    asked, t0, t1, slow = (_stack_values(v[full], at, place) for v in (c.asked, c.t0, c.t1, np.nan_to_num(slower)))
    end = np.max(t1, axis=2)
    before = np.concatenate([np.full((len(end), 1), -np.inf), np.fmax.accumulate(end, axis=1)[:, :-1]], axis=1)
    encode = np.clip(t0 - np.fmax(asked, before[:, :, None]), 0, None)
    chained = _chain_buckets(c, full, at, place)
    waited, fixed, after, woke = _read_waits(w, meetings, asked, t1)
    ended = np.take_along_axis(t1, np.maximum(chained, 0)[:, :, None], axis=1)
    own = np.where((chained >= 0)[:, :, None], np.clip(asked - ended, 0, None), asked - waited)
    service = np.clip(end - np.max(t0, axis=2), 0, None)
    return meetings, Replay(own, waited, fixed, after, woke, encode, service, np.nan_to_num(slow), chained)


def _read_waits(w: Window, meetings: np.ndarray, asked: Stack, t1: Stack) -> tuple[Stack, Stack, Stack, Stack]:
    _, k, p = asked.shape
    rows = w.lane("wait")
    rows = rows[~w.is_outside(rows) & np.isin(rows.step, meetings)]
    mine = np.searchsorted(meetings, rows.step) * p + w.column_of(rows.rank)
    order = np.lexsort((rows.t1, mine))
    mine, begins, stops = mine[order], rows.t0[order], rows.t1[order]
    # per wait: the rank's earlier stalls in this step, and the collective that ended it
    whose = np.broadcast_to(np.arange(len(meetings))[:, None, None] * p + np.arange(p), asked.shape).ravel()
    ended = _last_before(whose, t1.ravel(), mine, stops + MAX_REACTION)
    known = (ended >= 0) & (t1.ravel()[ended] > begins)
    sums = np.concatenate([[0.0], np.cumsum(stops - begins)])
    first = np.searchsorted(mine, mine)
    stood, after = sums[:-1] - sums[first], sums[1:] - sums[first]
    alone = np.where(known, 0.0, after)
    at = np.flatnonzero(~known)
    last = np.searchsorted(at, np.arange(len(mine)), side="right") - 1
    if len(at):
        alone = np.where((last >= 0) & (at[last] >= first), after[at[last]], 0.0)
    woke = begins - stood - np.where(known, stops - t1.ravel()[ended], 0.0)
    place = np.where(known, ended // p % k, -1)
    # the last wait before each request
    it = _last_before(mine, stops, whose, asked.ravel() + MAX_REACTION)

    def of(values: np.ndarray, none: float) -> Stack:
        return np.where(it >= 0, values[it] if len(values) else none, none).reshape(asked.shape)

    return of(after, 0.0), of(alone, 0.0), of(place, -1), of(woke, np.nan)


def _last_before(group: np.ndarray, time: np.ndarray, whose: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Returns the group's last event up to each question's time (`whose` and `until`), or -1.

    >>> _last_before(np.array([0, 0, 1]), np.array([1.0, 2.0, 1.0]), np.array([0, 0, 1]), np.array([1.5, 9.0, 0.5]))
    array([ 0,  1, -1])
    """
    n = len(group)
    groups, asks = np.concatenate([group, whose]), np.arange(n + len(whose)) >= n
    order = np.lexsort((asks, np.concatenate([time, until]), groups))
    events = np.where(asks[order] | np.isnan(np.concatenate([time, until])[order]), -1, np.arange(len(order)))
    found = order[np.maximum.accumulate(events)]
    found = np.where((np.maximum.accumulate(events) >= 0) & (groups[found] == groups[order]), found, -1)
    out = np.empty(len(whose), np.int64)
    out[order[asks[order]] - n] = found[asks[order]]
    return out


def _chain_buckets(c: Arrivals, full: np.ndarray, at: np.ndarray, place: np.ndarray) -> np.ndarray:
    """`(meetings, most collectives)`: predecessors in the bucket's chain, or -1."""
    out = np.full((int(at.max()) + 1, int(place.max()) + 1), -1)
    texts, code = np.unique(c.name[full].astype(str), return_inverse=True)
    bucket = np.unique([text.partition(" ")[2] for text in texts], return_inverse=True)[1][code]
    order = np.lexsort((place, bucket, at))
    this, before = order[1:], order[:-1]
    same = (at[this] == at[before]) & (bucket[this] == bucket[before])
    same &= (c.asked[full[this]] >= c.t1[full[before]] - MAX_REACTION).all(axis=1)
    out[at[this[same]], place[this[same]]] = place[before[same]]
    return out


def _number_places(at: np.ndarray) -> np.ndarray:
    order = np.argsort(at, kind="stable")
    counts = np.bincount(at)
    place = np.empty(len(at), np.int64)
    place[order] = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place


def _stack_values(values: np.ndarray, at: np.ndarray, place: np.ndarray) -> Stack:
    out = np.full((int(at.max()) + 1, int(place.max()) + 1, values.shape[1]), np.nan)
    out[at, place] = values
    return out
