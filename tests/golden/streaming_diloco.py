"""Streaming DiLoCo in numpy: Douillard et al., 2025, https://arxiv.org/abs/2501.18512, algorithm 2."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.golden.e3m0 import mean_in_four_bits
from tests.golden.problem import LAYERS, NUMEL, SIZE, STEPS, Problem, Replicas


def strided(fragments: int) -> list[np.ndarray]:
    """Returns each fragment's elements: layers f, f + fragments, f + 2 fragments, ... of the paper's figure 2."""
    layers = np.arange(NUMEL).reshape(LAYERS, SIZE)
    return [np.concatenate(layers[f::fragments]) for f in range(fragments)]


def streaming(
    problem: Problem,
    inner: Any,
    every: int,
    fragments: int,
    tau: int,
    alpha: float,
    outer_lr: float,
    momentum: float,
    four_bits: bool = False,
) -> np.ndarray:
    """Each fragment every H steps, H / F steps after the one before it; what it sends at t is received at t + tau.

    Delta = theta - mean_m theta_m   as it was at t;   theta <- OuterOpt(theta, Delta)   at t + tau, and
    theta_m <- alpha theta_m + (1 - alpha) theta
    """
    ranks = Replicas(problem, inner)
    theta, b = problem.start.copy(), np.zeros(NUMEL)
    places = strided(fragments)
    offsets = [(f + 1) * every // fragments for f in range(fragments)]
    received: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for step in range(STEPS):
        ranks.move(ranks.grads(step))
        t = step + 1
        for place, offset in zip(places, offsets, strict=True):
            if (t - offset) % every == 0:
                apart = theta[place] - ranks.x[:, place]
                mean = mean_in_four_bits(apart) if four_bits else apart.mean(0)
                received.setdefault(t + tau, []).append((place, mean))
        for place, outer_gradient in received.pop(t, []):
            b[place] = momentum * b[place] + outer_gradient
            theta[place] -= outer_lr * (outer_gradient + momentum * b[place])
            ranks.x[:, place] = alpha * ranks.x[:, place] + (1 - alpha) * theta[place]
        ranks.note()
    return ranks.path()
