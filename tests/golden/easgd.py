"""EASGD in numpy: Zhang, Choromanska and LeCun, 2015, https://arxiv.org/abs/1412.6651, the synchronous form."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.golden.problem import STEPS, Problem, Replicas


def easgd(problem: Problem, inner: Any, tau: int, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """The path, and (STEPS + 1, NUMEL) the centre's. alpha = beta / p; both lines use the old values.

    x_i <- x_i - eta g_i(x_i) - alpha (x_i - centre),   centre <- centre + alpha sum_i (x_i - centre)

    The elastic terms apply if tau divides t. The first step is t = 1. The gradient is taken before the pull.
    """
    ranks = Replicas(problem, inner)
    centre, alpha = problem.start.copy(), beta / problem.ranks
    centres = [centre]
    for step in range(STEPS):
        grads = ranks.grads(step)
        if (step + 1) % tau == 0:
            apart = ranks.x - centre
            ranks.x = ranks.x - alpha * apart
            centre = centre + alpha * apart.sum(0)
        ranks.move(grads)
        ranks.note()
        centres.append(centre)
    return ranks.path(), np.stack(centres)
