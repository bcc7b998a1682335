"""Any-batch mirror descent in numpy: Eshraghi and Liang, ICML 2020, with weights as of Anytime Minibatch, ICLR 2019."""

from __future__ import annotations

import numpy as np

from tests.golden.problem import LAYERS, NUMEL, SIZE, Problem, gradient


def metropolis(ranks: int, edges: list[tuple[int, int]]) -> np.ndarray:
    """(ranks, ranks) doubly stochastic: 1 / (1 + the larger degree) for neighbours."""
    degree = [sum(r in edge for edge in edges) for r in range(ranks)]
    w = np.zeros((ranks, ranks))
    for i, j in edges:
        w[i, j] = w[j, i] = 1 / (1 + max(degree[i], degree[j]))
    return w + np.diag(1 - w.sum(1))


def euclidean(x: np.ndarray, g: np.ndarray, lr: float) -> np.ndarray:
    """argmin <g, y> + |y - x|^2 / (2 lr)."""
    return x - lr * g


def entropic(x: np.ndarray, g: np.ndarray, lr: float) -> np.ndarray:
    """argmin <g, y> + (1 / lr) sum y log(y / x) over y with the sum of x. Each layer is separate."""
    rows, slope = x.reshape(LAYERS, SIZE), g.reshape(LAYERS, SIZE)
    y = rows * np.exp(-lr * slope)
    return (y / y.sum(1, keepdims=True) * rows.sum(1, keepdims=True)).reshape(NUMEL)


def exponential(ranks: int) -> list[np.ndarray]:
    """Returns mixings in which a rank takes half from the rank 1, 2, 4, ... before it, in turn."""
    hops = [2**k for k in range(ranks) if 2**k < ranks]
    return [(np.eye(ranks) + np.roll(np.eye(ranks), away, axis=0)) / 2 for away in hops]


def dabmd(problem: Problem, lr: float, batches: list[int], w: list[np.ndarray], rounds: int, mirror: str,
          weighted: bool, steps: int, first: bool = False, decay: float = 0.0) -> np.ndarray:  # fmt: skip
    """Rank i takes its next batches[i] batches in each round. Numerators and denominators are mixed separately.

    w: the mixing matrices, repeated in this order
    first: mix the x before the step; the step then uses the gradient at the unmixed x
    decay: the step of round t = 1, 2, ... is lr / t^decay
    """
    x = np.tile(problem.start, (problem.ranks, 1))
    drawn = [0] * problem.ranks
    have = problem.x.shape[1]
    b = np.array(batches if weighted else [1] * problem.ranks, dtype=float)[:, None]
    seen = [x.copy()]
    for step in range(steps):
        y, g = np.empty_like(x), np.empty_like(x)
        through = np.eye(problem.ranks)
        for k in range(rounds):
            through = w[(step * rounds + k) % len(w)] @ through
        for i in range(problem.ranks):
            at = [(drawn[i] + k) % have for k in range(batches[i])]
            drawn[i] += batches[i]
            g[i] = np.mean([gradient(problem.x[i, t], problem.y[i, t], x[i]) for t in at], axis=0)
        if first:
            x = through @ (b * x) / (through @ b)
        for i in range(problem.ranks):
            y[i] = (euclidean if mirror == "euclidean" else entropic)(x[i], g[i], lr / (step + 1) ** decay)
        x = y if first else through @ (b * y) / (through @ b)
        seen.append(x.copy())
    return np.stack(seen)
