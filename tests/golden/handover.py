"""From SlowMo to DiLoCo in numpy: the outer momentum changes from units of gradients to units of displacements."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.golden.problem import STEPS, Problem, Replicas
from tests.golden.slowmo import settle


def slowmo_then_diloco(
    problem: Problem, inner: Any, every: int, at: int, beta: float, outer_lr: float, momentum: float
) -> np.ndarray:
    """SlowMo(beta, alpha = 1) for `at` steps, whole rounds; then DiLoCo, whose b begins as gamma u.

    Ranks come to one state in between: their optimizers' memories are averaged.
    """
    ranks = Replicas(problem, inner)
    gamma = ranks.optimizers[0].lr
    theta, u = problem.start.copy(), np.zeros_like(problem.start)
    b = u
    for step in range(STEPS):
        if step == at:
            b = gamma * u
            settle(ranks, "average")
        ranks.move(ranks.grads(step))
        if (step + 1) % every == 0:
            apart = theta - ranks.x.mean(0)
            if step < at:
                u = beta * u + apart / gamma
                theta = theta - gamma * u
            else:
                b = momentum * b + apart
                theta = theta - outer_lr * (apart + momentum * b)
            ranks.x[:] = theta
        ranks.note()
    return ranks.path()
