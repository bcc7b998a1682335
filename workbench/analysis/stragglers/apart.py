"""How many steps ranks had trained alone at a measurement.

A periodic strategy's ranks drift apart within a round and agree at its end. A line through measurements would show
their places in the round, not the drift.
"""

from __future__ import annotations

import numpy as np

from workbench.analysis.compare.compression import list_buckets
from workbench.analysis.steps.collectives import is_message
from workbench.analysis.steps.window import Window
from workbench.record.timeline import Timeline

MAX_STEPS_BACK = 512  # steps back to look for a meeting


def since_met(tl: Timeline, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `(n,)` steps alone before each of `steps`, and `(n,)` the previous round's length.

    -1 without a known meeting, as with messages only. A hand-over is a meeting.
    """
    if not len(steps):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    w = Window(tl, max(0, int(steps.min()) - MAX_STEPS_BACK), int(steps.max()) + 1)
    rows, _ = list_buckets(w.lane("comm"))
    met = np.unique(rows.step[~w.is_outside(rows) & ~is_message(rows)]).astype(np.int64)
    agreed = np.union1d(met, w.lane("switch").step.astype(np.int64) - 1)
    at = np.searchsorted(agreed, steps) - 1
    since = np.where(at >= 0, steps - 1 - agreed[at], -1) if len(agreed) else np.full(len(steps), -1)
    rounds = np.diff(met)
    if not len(rounds):
        return np.where(since > 0, since, -1), np.where(since > 0, since + 1, -1)
    behind = np.clip(np.searchsorted(met, steps) - 2, 0, len(rounds) - 1)
    return since, np.where(since >= 0, np.maximum(rounds[behind], since), -1)
