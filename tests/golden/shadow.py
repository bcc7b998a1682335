"""The shadows of ShadowSync in numpy, given when each rank steps, looks and is corrected: Zheng et al., 2020.

https://arxiv.org/abs/2003.03477, with the correction added instead of mixed in (Gan et al., VLDB 2021).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tests.golden.problem import Problem


class Event(NamedTuple):
    """An event on `rank`: "forward", "update", "look" (at its parameters), "meet" (the server) or "correct"."""

    at: float
    order: int  # among events of one moment
    what: str
    rank: int


class _Ranks:
    def __init__(self, problem: Problem, lr: float) -> None:
        self.problem, self.lr = problem, lr
        self.x = np.stack([problem.start] * problem.ranks)
        self.before = self.x.copy()
        self.grads = np.zeros_like(self.x)
        self.steps = [0] * problem.ranks
        self.seen: list[list[np.ndarray]] = [[] for _ in range(problem.ranks)]

    def happens(self, event: Event) -> None:
        rank, step = event.rank, self.steps[event.rank]
        if event.what == "forward":
            self.seen[rank].append(self.x[rank].copy())
            self.grads[rank] = self.problem.grad(rank, step % self.problem.x.shape[1], self.x[rank])
        elif event.what == "update":
            self.x[rank] -= self.lr * self.grads[rank]
            self.steps[rank] += 1
        elif event.what == "look":
            self.before[rank] = self.x[rank]


def easgd(problem: Problem, lr: float, alpha: float, events: Iterable[Event]) -> list[list[np.ndarray]]:
    """Returns the parameters at each rank's forwards."""
    ranks = _Ranks(problem, lr)
    centre, back = problem.start.copy(), ranks.x.copy()
    for event in sorted(events):
        rank = event.rank
        ranks.happens(event)
        if event.what == "meet":
            centre = (1 - alpha) * centre + alpha * ranks.before[rank]
            back[rank] = centre
        elif event.what == "correct":
            ranks.x[rank] += alpha * (back[rank] - ranks.before[rank])
    return ranks.seen


def bmuf(
    problem: Problem, lr: float, alpha: float, eta: float, zeta: float, events: Iterable[Event]
) -> list[list[np.ndarray]]:
    """Returns the parameters at each rank's forwards. With eta = 0 and zeta = 1 the shadow averages."""
    ranks, corrected = _Ranks(problem, lr), 0
    w, delta = problem.start.copy(), np.zeros_like(problem.start)
    for event in sorted(events):
        ranks.happens(event)
        if event.what == "correct":
            if corrected % problem.ranks == 0:
                delta = eta * delta + zeta * (ranks.before.mean(0) - w)
                w = w + delta
            corrected += 1
            ranks.x[event.rank] += alpha * (w - ranks.before[event.rank])
    return ranks.seen
