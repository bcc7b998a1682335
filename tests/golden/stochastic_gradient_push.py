"""SGP in numpy: Assran et al., 2019, https://arxiv.org/abs/1811.10792, algorithm 1, and with overlap."""

from __future__ import annotations

from collections.abc import Callable
from math import floor, log2
from typing import Any

import numpy as np

from tests.golden.problem import STEPS, Problem, Replicas


def shares(receivers: list[list[int]]) -> np.ndarray:
    """P, (p, p), columns add up to 1: node j keeps 1 / (1 + its receivers) and gives as much to each of them."""
    p = np.zeros((len(receivers), len(receivers)))
    for j, to in enumerate(receivers):
        p[[j, *to], j] = 1 / (1 + len(to))
    return p


def exponential(p: int, k: int) -> np.ndarray:
    """P of round k: each node sends to the one that is 1, 2, ..., 2^floor(log2(p-1)) hops away, in turn."""
    hop = 2 ** (k % (floor(log2(p - 1)) + 1))
    return shares([[(j + hop) % p] for j in range(p)])


def ring(p: int, k: int) -> np.ndarray:
    return shares([[(j + 1) % p] for j in range(p)])


def chain(p: int, k: int) -> np.ndarray:
    return shares([[i for i in (j - 1, j + 1) if 0 <= i < p] for j in range(p)])


def push(
    problem: Problem, inner: Any, graph: Callable[[int, int], np.ndarray], every: int = 1, delay: int = 0
) -> np.ndarray:
    """The path of z = x / w. The step is made by x, with the gradient at z.

    x_i <- sum_j P_ij x_j,   w_i <- sum_j P_ij w_j   in every `every`-th step

    With overlap what is pushed is taken `delay` steps later, as late as the paper allows.
    """
    p = problem.ranks
    ranks = Replicas(problem, inner)  # .x is z
    w = np.ones(p)
    flying: list[tuple[int, np.ndarray, np.ndarray]] = []  # the step of arrival, and what arrives of x and w
    for step in range(STEPS):
        grads = ranks.grads(step)
        ranks.x = ranks.x * w[:, None]
        ranks.move(grads)
        if step % every == 0:
            matrix = graph(p, step // every)
            kept = np.diag(matrix)
            given = matrix - np.diag(kept)
            flying.append((step + delay, given @ ranks.x, given @ w))
            ranks.x, w = kept[:, None] * ranks.x, kept * w
        for _, x_arriving, w_arriving in [f for f in flying if f[0] == step]:
            ranks.x, w = ranks.x + x_arriving, w + w_arriving
        ranks.x = ranks.x / w[:, None]
        ranks.note()
    return ranks.path()
