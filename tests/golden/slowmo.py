"""SlowMo in numpy: Wang et al., 2019, https://arxiv.org/abs/1910.00643, algorithm 1 over Local SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.golden.problem import STEPS, Problem, Replicas


def slowmo(
    problem: Problem,
    inner: Any,
    tau: int,
    beta: float,
    alpha: float,
    buffers: str = "keep",
    rates: Mapping[int, float] | None = None,
) -> np.ndarray:
    """x_t,0 is where all begin round t and gamma_t its learning rate; `rates`: the step from which on it is another.

    u_t+1 = beta u_t + (x_t,0 - mean_i x_t,tau) / gamma_t,   x_t+1,0 = x_t,0 - alpha gamma_t u_t+1
    """
    ranks = Replicas(problem, inner)
    x0, u = problem.start.copy(), np.zeros_like(problem.start)
    for step in range(STEPS):
        for optimizer in ranks.optimizers:
            optimizer.lr = (rates or {}).get(step, optimizer.lr)
        gamma = ranks.optimizers[0].lr
        ranks.move(ranks.grads(step))
        if (step + 1) % tau == 0:
            u = beta * u + (x0 - ranks.x.mean(0)) / gamma
            x0 = x0 - alpha * gamma * u
            ranks.x[:] = x0
            settle(ranks, buffers)
        ranks.note()
    return ranks.path()


def settle(ranks: Replicas, buffers: str) -> None:
    """Sets the base optimizers' state after a round. Ranks keep their own, begin with zero, or take the mean."""
    mean = [np.mean(same, axis=0) for same in zip(*(o.slots for o in ranks.optimizers), strict=True)]
    for optimizer in ranks.optimizers:
        if buffers == "zero":
            optimizer.slots = [np.zeros_like(slot) for slot in mean]
        elif buffers == "average":
            optimizer.slots = [slot.copy() for slot in mean]
