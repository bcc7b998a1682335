"""SelSync in numpy: Tyagi and Swany, 2023, https://arxiv.org/abs/2307.07950, and its authors' code for the norm."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from tests.golden.problem import LAYERS, STEPS, Problem, Replicas, gradient


def smooth(values: list[float], window: int, smoothing: float) -> float:
    """Returns the exponentially weighted mean of the last `window` values. Weights fall by 1 - smoothing per step."""
    last = np.array(values[-window:])
    weights = (1 - smoothing) ** np.arange(len(last))[::-1]
    return float(weights @ last / weights.sum())


def selsync(
    problem: Problem,
    inner: Any,
    delta: float,
    window: int,
    norm_window: int = 1,
    smoothing: float = 0.01,
    gradients: bool = False,
    givers: float = 0.0,
    share: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The path; each rank's smoothed change, (ranks, STEPS - 1), from the second step on; (STEPS,) bool: all averaged.

    n_i(t) is the sum of the layers' gradient norms, smoothed; change = |n_i(t) - n_i(t-1)| / n_i(t-1), smoothed in its
    turn. Where any rank's is delta or more, or its window not yet full, all average: their parameters after the step,
    or their gradients before it. `givers` of the ranks in turn give the first `share` of their examples to all others.
    """
    p = problem.ranks
    ranks = Replicas(problem, inner)
    raw: list[list[float]] = [[] for _ in range(p)]
    norms: list[list[float]] = [[] for _ in range(p)]
    changes: list[list[float]] = [[] for _ in range(p)]
    smoothed: list[list[float]] = [[] for _ in range(p)]
    synchronised = []
    for step in range(STEPS):
        grads = np.stack([gradient(*_examples(problem, r, step, givers, share), x) for r, x in enumerate(ranks.x)])
        due = False
        for r in range(p):
            raw[r].append(sum(float(np.sqrt(layer @ layer)) for layer in np.split(grads[r], LAYERS)))
            norms[r].append(smooth(raw[r], norm_window, smoothing))
            if step:
                changes[r].append(abs(norms[r][-1] - norms[r][-2]) / norms[r][-2])
                smoothed[r].append(smooth(changes[r], window, smoothing))
            due |= len(changes[r]) < window or smoothed[r][-1] >= delta
        if due and gradients:
            grads[:] = grads.mean(0)
        ranks.move(grads)
        if due and not gradients:
            ranks.x[:] = ranks.x.mean(0)
        synchronised.append(due)
        ranks.note()
    return ranks.path(), np.array(smoothed), np.array(synchronised)


def _examples(problem: Problem, rank: int, step: int, givers: float, share: float) -> tuple[np.ndarray, np.ndarray]:
    """A rank's examples, and what others give it in this step: ceil(givers p) of them, one after the other."""
    count = ceil(givers * problem.ranks)
    giving = [(step * count + k) % problem.ranks for k in range(count)]
    x, y = problem.x[:, step], problem.y[:, step]
    first = round(share * x.shape[1])
    others = [g for g in giving if g != rank]
    return np.concatenate([x[rank], *(x[g, :first] for g in others)]), np.concatenate(
        [y[rank], *(y[g, :first] for g in others)]
    )
