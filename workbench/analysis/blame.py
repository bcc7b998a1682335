"""What a late rank costs the others: the collectives of a step played again, as if it had come with them.

A delay at the first bucket may be hidden then and push the last one out, so waits cannot simply be added up.
Played again, collective k begins when every rank is ready for it and collective k-1 is over,

    begin_k = max_r (max(asked_rk, end_{k-1}) + encode_rk),     end_k = begin_k + service_k

and the harm of rank r is by how much earlier the last collective ends when r is ready, encodes and sends no later
than the median of the others. Nobody can gain more than the time for which its step stood still.
"""

from __future__ import annotations

import numpy as np

from workbench.analysis.collectives import Arrivals, against_others
from workbench.analysis.window import Window

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
    harm = _harm(asked, t0, np.max(t1, axis=2), np.nan_to_num(slower))
    stood = w.seconds("wait")[meetings - w.first]  # (meetings, p)
    return meetings, np.minimum(harm[:, None, :], stood[:, :, None]) * ~np.eye(p, dtype=bool)


def _harm(asked: Stack, t0: Stack, end: Stack, slower: Stack) -> np.ndarray:
    """(meetings, ranks) seconds by which each rank puts off the end of the last collective."""
    m, _, p = asked.shape
    before = np.concatenate([np.full((m, 1), -np.inf), np.fmax.accumulate(end, axis=1)[:, :-1]], axis=1)
    encode = np.clip(t0 - np.fmax(asked, before[:, :, None]), 0, None)
    service = np.clip(end - np.max(t0, axis=2), 0, None)
    harm = np.zeros((m, p))
    real = _play(asked, encode, service)
    for r in range(p):
        ready, quick = asked.copy(), encode.copy()
        ready[:, :, r] = np.fmin(asked[:, :, r], _others(asked, r))
        quick[:, :, r] = np.fmin(encode[:, :, r], _others(encode, r))
        harm[:, r] = real - _play(ready, quick, np.clip(service - slower[:, :, r], 0, None))
    return np.clip(harm, 0, None)


def _play(asked: Stack, encode: Stack, service: Stack) -> np.ndarray:
    """(meetings,) when the last collective ends; NaN marks that a step has no further one."""
    end = np.full(len(asked), -np.inf)
    for k in range(asked.shape[1]):
        begin = np.max(np.maximum(asked[:, k], end[:, None]) + encode[:, k], axis=1)
        end = np.where(np.isnan(begin), end, begin + service[:, k])
    return end


def _others(values: Stack, r: int) -> Stack:
    return np.asarray(np.median(np.delete(values, r, axis=2), axis=2))


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
