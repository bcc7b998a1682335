"""What a late rank costs the others: the collectives of a step played again, as if it had come with them.

A delay at the first bucket may be hidden then and push the last one out, so waits cannot simply be added up.
Played again, collective k begins when every rank is ready for it and collective k-1 is over,

    begin_k = max_r (max(asked_rk, end_{k-1}) + encode_rk),     end_k = begin_k + service_k

and the harm of rank r is by how much earlier the last collective ends when r is ready, encodes and sends no later
than the median of the others. Nobody can gain more than the time for which its step stood still. What is asked once an
earlier collective of the same bucket is over (values after indices, a second factor, a second hop) is asked earlier
where that ends earlier: of it asked is counted from there.
"""

from __future__ import annotations

import numpy as np

from workbench.analysis.collectives import Arrivals, against_others, of_others
from workbench.analysis.window import Window

INSTANT = 1e-6  # seconds: what is asked when another ends is asked because of that

Stack = np.ndarray  # (meetings, collectives of one, ...)


def blame(w: Window, c: Arrivals) -> tuple[np.ndarray, np.ndarray]:
    """(steps at which all ranks met, seconds[meeting, victim, culprit])."""
    full = np.flatnonzero(c.full)
    meetings, at = np.unique(c.step[full], return_inverse=True)
    p = len(w.ranks)
    if not len(meetings):
        return meetings, np.zeros((0, p, p))
    place = _place(at)
    slower = np.clip(np.nan_to_num(against_others(c.port)), 0, None)
    asked, t0, t1, slower = (_stacked(v[full], at, place) for v in (c.asked, c.t0, c.t1, slower))
    harm = _harm(asked, t0, t1, np.nan_to_num(slower), _chained(c, full, at, place))
    stood = w.seconds("wait")[meetings - w.first]  # (meetings, p)
    return meetings, np.minimum(harm[:, None, :], stood[:, :, None]) * ~np.eye(p, dtype=bool)


def relief(w: Window, c: Arrivals, ranks: list[int]) -> np.ndarray:
    """(meetings,) seconds by which the last collective of each would end earlier, had some ranks come with the rest.

    ranks: their columns. They are ready, encode and send no later than the median of the others. It is no more than the
    others stood still.
    """
    full = np.flatnonzero(c.full)
    meetings, at = np.unique(c.step[full], return_inverse=True)
    rest = np.setdiff1d(np.arange(len(w.ranks)), ranks)
    if not len(meetings) or not len(rest) or not len(ranks):
        return np.zeros(len(meetings))
    place = _place(at)
    slower = np.nan_to_num(c.port - np.median(c.port[:, rest], axis=1, keepdims=True))[:, ranks].max(axis=1, initial=0)
    asked, t0, t1 = (_stacked(v[full], at, place) for v in (c.asked, c.t0, c.t1))
    quicker = _stacked(slower[full, None], at, place)[:, :, 0]
    chained = _chained(c, full, at, place)
    encode, service = _parts(asked, t0, np.max(t1, axis=2))
    asked = _since(asked, t1, chained)
    ready, quick = asked.copy(), encode.copy()
    for r in ranks:
        ready[:, :, r] = np.fmin(asked[:, :, r], np.median(asked[:, :, rest], axis=2))
        quick[:, :, r] = np.fmin(encode[:, :, r], np.median(encode[:, :, rest], axis=2))
    sooner = _play(ready, quick, np.clip(service - np.nan_to_num(quicker), 0, None), chained)
    gained = _play(asked, encode, service, chained) - sooner
    stood = np.median(w.seconds("wait")[meetings - w.first][:, rest], axis=1)
    return np.clip(np.minimum(gained, stood), 0, None)


def _harm(asked: Stack, t0: Stack, t1: Stack, slower: Stack, chained: np.ndarray) -> np.ndarray:
    """(meetings, ranks) seconds by which each rank puts off the end of the last collective."""
    m, _, p = asked.shape
    encode, service = _parts(asked, t0, np.max(t1, axis=2))
    asked = _since(asked, t1, chained)
    harm = np.zeros((m, p))
    real = _play(asked, encode, service, chained)
    earlier, quicker = np.fmin(asked, of_others(asked)), np.fmin(encode, of_others(encode))
    for r in range(p):
        ready, quick = asked.copy(), encode.copy()
        ready[:, :, r], quick[:, :, r] = earlier[:, :, r], quicker[:, :, r]
        harm[:, r] = real - _play(ready, quick, np.clip(service - slower[:, :, r], 0, None), chained)
    return np.clip(harm, 0, None)


def _parts(asked: Stack, t0: Stack, end: Stack) -> tuple[Stack, Stack]:
    """(seconds that each rank encoded for each collective, seconds that each then took)."""
    before = np.concatenate([np.full((len(end), 1), -np.inf), np.fmax.accumulate(end, axis=1)[:, :-1]], axis=1)
    encode = np.clip(t0 - np.fmax(asked, before[:, :, None]), 0, None)
    return encode, np.clip(end - np.max(t0, axis=2), 0, None)


def _play(asked: Stack, encode: Stack, service: Stack, chained: np.ndarray) -> np.ndarray:
    """(meetings,) when the last collective ends; NaN marks that a step has no further one."""
    end = np.full(len(asked), -np.inf)
    ends = np.full(asked.shape[:2], -np.inf)
    for k in range(asked.shape[1]):
        known = np.where(chained[:, k] >= 0, np.take_along_axis(ends, chained[:, k, None], axis=1)[:, 0], 0.0)
        ready = asked[:, k] + known[:, None]
        begin = np.max(np.maximum(ready, end[:, None]) + encode[:, k], axis=1)
        ends[:, k] = end = np.where(np.isnan(begin), end, begin + service[:, k])
    return end


def _chained(c: Arrivals, full: np.ndarray, at: np.ndarray, place: np.ndarray) -> np.ndarray:
    """(meetings, most collectives) the place of the one of its bucket that each waited for; -1: of none."""
    out = np.full((int(at.max()) + 1, int(place.max()) + 1), -1)
    texts, code = np.unique(c.name[full].astype(str), return_inverse=True)
    bucket = np.unique([text.partition(" ")[2] for text in texts], return_inverse=True)[1][code]
    order = np.lexsort((place, bucket, at))
    this, before = order[1:], order[:-1]
    same = (at[this] == at[before]) & (bucket[this] == bucket[before])
    same &= (c.asked[full[this]] >= c.t1[full[before]] - INSTANT).all(axis=1)
    out[at[this[same]], place[this[same]]] = place[before[same]]
    return out


def _since(asked: Stack, t1: Stack, chained: np.ndarray) -> Stack:
    """`asked`, of what waited for another collective counted from the end of that, on each rank by its own clock."""
    ended = np.take_along_axis(t1, np.maximum(chained, 0)[:, :, None], axis=1)
    since: np.ndarray = np.where((chained >= 0)[:, :, None], np.clip(asked - ended, 0, None), asked)
    return since


def _place(at: np.ndarray) -> np.ndarray:
    """The number of each collective within its step; `at` says which meeting it belongs to."""
    order = np.argsort(at, kind="stable")
    counts = np.bincount(at)
    place = np.empty(len(at), np.int64)
    place[order] = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place


def _stacked(values: np.ndarray, at: np.ndarray, place: np.ndarray) -> Stack:
    """(collectives, p) as (meetings, most collectives, p), filled up with NaN."""
    out = np.full((int(at.max()) + 1, int(place.max()) + 1, values.shape[1]), np.nan)
    out[at, place] = values
    return out
