"""DiLoCo in numpy: Douillard et al., 2023, https://arxiv.org/abs/2311.08105, algorithm 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.golden.problem import STEPS, Problem, Replicas


def diloco(
    problem: Problem, inner: Any, every: int, outer_lr: float, momentum: float, nesterov: bool = True
) -> np.ndarray:
    """Each rank makes H steps from a common theta. SGD with momentum then takes the gradient theta - mean_i theta_i.

    The state of inner optimizers is never reset nor exchanged.
    """
    ranks = Replicas(problem, inner)
    theta, b = problem.start.copy(), np.zeros_like(problem.start)
    for step in range(STEPS):
        ranks.move(ranks.grads(step))
        if (step + 1) % every == 0:
            outer_gradient = theta - ranks.x.mean(0)
            b = momentum * b + outer_gradient
            theta = theta - outer_lr * (outer_gradient + momentum * b if nesterov else b)
            ranks.x[:] = theta
        ranks.note()
    return ranks.path()
