"""What a late rank costs the others: the collectives of a step played again, as if it had come with them.

A delay at the first bucket may be hidden then and push the last one out, so waits cannot simply be added up. The harm
of a rank is by how much earlier the last collective ends (`replay`) when it is ready, encodes and sends no later than
the median of the others. Nobody can gain more than the time for which its step stood still.
"""

from __future__ import annotations

import numpy as np

from workbench.analysis.steps.collectives import Arrivals, against_others
from workbench.analysis.steps.window import Window
from workbench.analysis.stragglers.replay import replay


def blame(w: Window, c: Arrivals) -> tuple[np.ndarray, np.ndarray]:
    """(steps at which all ranks met, seconds[meeting, victim, culprit])."""
    p = len(w.ranks)
    meetings, played = replay(w, c, np.clip(np.nan_to_num(against_others(c.port)), 0, None))
    if played is None:
        return meetings, np.zeros((0, p, p))
    real, usual = played.end(), played.usual()
    harm = np.stack([np.clip(real - played.without([r], usual).end(), 0, None) for r in range(p)], axis=1)
    stood = w.seconds("wait")[meetings - w.first]  # (meetings, p)
    return meetings, np.minimum(harm[:, None, :], stood[:, :, None]) * ~np.eye(p, dtype=bool)


def relief(w: Window, c: Arrivals, ranks: list[int]) -> np.ndarray:
    """(meetings,) seconds by which the last collective of each would end earlier, had some ranks come with the rest.

    ranks: their columns. They are ready, encode and send no later than the median of the others. It is no more than the
    others stood still.
    """
    rest = np.setdiff1d(np.arange(len(w.ranks)), ranks)
    if not len(rest) or not len(ranks):
        return np.zeros(len(np.unique(c.step[c.full])))
    slower = np.zeros_like(c.port)
    slower[:, ranks] = (c.port - np.median(c.port[:, rest], axis=1, keepdims=True))[:, ranks]
    meetings, played = replay(w, c, np.clip(np.nan_to_num(slower), 0, None))
    if played is None:
        return np.zeros(0)
    gained = played.end() - played.without(ranks, played.usual(rest)).end()
    stood = np.median(w.seconds("wait")[meetings - w.first][:, rest], axis=1)
    out: np.ndarray = np.clip(np.minimum(gained, stood), 0, None)
    return out
