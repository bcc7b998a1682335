"""BMUF in numpy: Chen and Huo, ICASSP 2016, https://ieeexplore.ieee.org/document/7472805."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.golden.problem import STEPS, Problem, Replicas


def bmuf(
    problem: Problem,
    inner: Any,
    every: int,
    eta: float,
    zeta: float,
    nesterov: bool = False,
    rates: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Ranks train a block from Wg(t-1) to Wbar(t), their mean. rates: new learning rates by step

    G(t) = Wbar(t) - Wg(t-1),   Delta(t) = eta Delta(t-1) + zeta G(t),   W(t) = W(t-1) + Delta(t)
    Wg(t) = W(t) for classical block momentum,   W(t) + eta Delta(t) for Nesterov block momentum
    """
    ranks = Replicas(problem, inner)
    w = wg = problem.start.copy()
    delta = np.zeros_like(w)
    for step in range(STEPS):
        for optimizer in ranks.optimizers:
            optimizer.lr = (rates or {}).get(step, optimizer.lr)
        ranks.move(ranks.grads(step))
        if (step + 1) % every == 0:
            g = ranks.x.mean(0) - wg
            delta = eta * delta + zeta * g
            w = w + delta
            wg = w + eta * delta if nesterov else w
            ranks.x[:] = wg
        ranks.note()
    return ranks.path()
