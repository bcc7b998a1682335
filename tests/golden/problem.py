"""A problem to train, in numpy: linear regression on each rank's own examples, with optimizers.

Neither this file nor the papers' files next to it import the workbench. They give the results that it must compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np

STEPS = 40
LAYERS, INPUTS, OUTPUTS, EXAMPLES = 4, 16, 40, 8
SIZE = INPUTS * OUTPUTS  # elements of one layer
NUMEL = LAYERS * SIZE


class Problem:
    """min over theta of 1/2 mean_e ||sum_l W_l x_el - y_e||^2. Each rank has its own examples and optimum.

    theta: (NUMEL,) float64: W_0, W_1, ... row by row, each (OUTPUTS, INPUTS), so they are four layers of equal size.
    """

    def __init__(self, ranks: int) -> None:
        rng = np.random.default_rng(11)
        self.ranks = ranks
        self.start = 0.3 * rng.standard_normal(NUMEL)
        at = ranks, STEPS + 1
        best = rng.standard_normal((ranks, OUTPUTS, LAYERS * INPUTS))
        self.x = 0.5 * rng.standard_normal((*at, EXAMPLES, LAYERS * INPUTS)) * rng.uniform(0.7, 1.2, (*at, 1, 1))
        self.y = np.einsum("roi,rtei->rteo", best, self.x) + 0.3 * rng.standard_normal((*at, EXAMPLES, OUTPUTS))

    def grad(self, rank: int, step: int, theta: np.ndarray) -> np.ndarray:
        """(NUMEL,): the gradient at theta of the examples of one rank in one step, counted from 0."""
        return gradient(self.x[rank, step], self.y[rank, step], theta)


def gradient(x: np.ndarray, y: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """x (e, LAYERS * INPUTS), y (e, OUTPUTS) -> (NUMEL,)."""
    w = np.concatenate(list(theta.reshape(LAYERS, OUTPUTS, INPUTS)), axis=1)
    slope = (x @ w.T - y).T @ x / len(x)
    return np.concatenate([part.ravel() for part in np.split(slope, LAYERS, axis=1)])


class SGD:
    """v <- momentum v + g;  x <- x - lr v, or with Nesterov x - lr (g + momentum v). g includes weight_decay x."""

    def __init__(self, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        self.lr, self.momentum, self.nesterov, self.decay = lr, momentum, nesterov, weight_decay
        self.slots = [np.zeros(NUMEL)] if momentum else []

    def step(self, x: np.ndarray, grad: np.ndarray) -> np.ndarray:
        g = grad + self.decay * x
        if not self.slots:
            return x - self.lr * g
        self.slots[0] = v = self.momentum * self.slots[0] + g
        return x - self.lr * (g + self.momentum * v if self.nesterov else v)


class AdamW:
    """Adam with corrected moments; weight decay shrinks x apart from them."""

    def __init__(self, lr: float, weight_decay: float = 0.01) -> None:
        self.lr, self.decay, self.t = lr, weight_decay, 0
        self.slots = [np.zeros(NUMEL), np.zeros(NUMEL)]

    def step(self, x: np.ndarray, grad: np.ndarray) -> np.ndarray:
        self.t += 1
        m, v = self.slots
        self.slots = [m, v] = [0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2]
        m, v = m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)
        return x - self.lr * self.decay * x - self.lr * m / (np.sqrt(v) + 1e-8)


class Replicas:
    """All ranks' parameters, x: (ranks, NUMEL), their optimizers, and x after each step."""

    def __init__(self, problem: Problem, inner: Any) -> None:
        self.problem = problem
        self.optimizers = [inner() for _ in range(problem.ranks)]
        self.x = np.tile(problem.start, (problem.ranks, 1))
        self.seen = [self.x.copy()]

    def grads(self, step: int) -> np.ndarray:
        """Returns (ranks, NUMEL): each rank's gradient at its parameters."""
        return np.stack([self.problem.grad(r, step, x) for r, x in enumerate(self.x)])

    def move(self, grads: np.ndarray) -> None:
        """Makes one step of each rank's optimizer."""
        self.x = np.stack([o.step(x, g) for o, x, g in zip(self.optimizers, self.x, grads, strict=True)])

    def note(self) -> None:
        """Records x at the end of a step."""
        self.seen.append(self.x.copy())

    def path(self) -> np.ndarray:
        """(STEPS + 1, ranks, NUMEL): the parameters at first and after each step."""
        return np.stack(self.seen)
