"""Local AdaAlter in numpy: Xie et al., 2019, https://arxiv.org/abs/1911.09030."""

from __future__ import annotations

import numpy as np

from tests.golden.problem import STEPS, Problem


def ada_alter(problem: Problem, lr: float, every: int, b0: float, eps: float) -> np.ndarray:
    """t counts steps from 1, t' = mod(t - 1, H) + 1; b^2 is of the last step in which all synchronised.

        y_i,t = x_i,t-1 - lr g_i,t / sqrt(b^2_t-t' + t' eps^2),   a^2_i,t = a^2_i,t-1 + g_i,t^2

    If H divides t, x is the mean of all y, and b^2 and each a^2_i are the mean of all a^2. Otherwise x_i,t = y_i,t.
    """
    x = np.tile(problem.start, (problem.ranks, 1))
    b_squared = np.full_like(problem.start, b0**2)
    a_squared = np.tile(b_squared, (problem.ranks, 1))
    seen = [x.copy()]
    for t in range(1, STEPS + 1):
        placeholder = (t - 1) % every + 1
        grads = np.stack([problem.grad(r, t - 1, x[r]) for r in range(problem.ranks)])
        x = x - lr * grads / np.sqrt(b_squared + placeholder * eps**2)
        a_squared = a_squared + grads**2
        if t % every == 0:
            x[:] = x.mean(0)
            b_squared = a_squared.mean(0)
            a_squared[:] = b_squared
        seen.append(x.copy())
    return np.stack(seen)
