"""The cost of a late rank, from a replay with the rank on time.

Sums of waits would mislead: a delay hidden at the first bucket may still delay the last. A rank's harm is how much
earlier the last collective ends with this rank on time. "On time" means that it is ready, encodes and sends no later
than the other ranks' median. No rank gains more than its step's stall.
"""

from __future__ import annotations

import numpy as np

from workbench.analysis.steps.collectives import Arrivals, against_others
from workbench.analysis.steps.window import Window
from workbench.analysis.stragglers.replay import make_replay


def blame_ranks(w: Window, c: Arrivals) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps of all ranks' meetings, and `seconds[meeting, victim, culprit]`."""
    p = len(w.ranks)
    meetings, played = make_replay(w, c, np.clip(np.nan_to_num(against_others(c.port)), 0, None))
    if played is None:
        return meetings, np.zeros((0, p, p))
    real, usual = played.find_ends(), played.as_usual()
    harm = np.stack([np.clip(real - played.without_ranks([r], usual).find_ends(), 0, None) for r in range(p)], axis=1)
    stood = w.seconds("wait")[meetings - w.first]  # (meetings, p)
    return meetings, np.minimum(harm[:, None, :], stood[:, :, None]) * ~np.eye(p, dtype=bool)


def measure_relief(w: Window, c: Arrivals, ranks: list[int]) -> np.ndarray:
    """Returns `(meetings,)` seconds gained if `ranks` (columns) had the other ranks' median, up to their stall."""
    rest = np.setdiff1d(np.arange(len(w.ranks)), ranks)
    if not len(rest) or not len(ranks):
        return np.zeros(len(np.unique(c.step[c.full])))
    slower = np.zeros_like(c.port)
    slower[:, ranks] = (c.port - np.median(c.port[:, rest], axis=1, keepdims=True))[:, ranks]
    meetings, played = make_replay(w, c, np.clip(np.nan_to_num(slower), 0, None))
    if played is None:
        return np.zeros(0)
    gained = played.find_ends() - played.without_ranks(ranks, played.as_usual(rest)).find_ends()
    stood = np.median(w.seconds("wait")[meetings - w.first][:, rest], axis=1)
    out: np.ndarray = np.clip(np.minimum(gained, stood), 0, None)
    return out
