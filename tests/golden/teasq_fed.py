"""The server of TEA-Fed and TEASQ-Fed in numpy, for a given order of messages: Jia et al., 2023."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from tests.golden.problem import Problem


class Knobs(NamedTuple):
    clients: int
    share: float
    cache: int
    local: int
    mixing: float
    staleness: float
    proximal: float


def teasq_fed(problem: Problem, lr: float, knobs: Knobs, order: list[int],
              batches: dict[int, int] | None = None) -> tuple[np.ndarray, list[int], int]:  # fmt: skip
    """Returns the model, the staleness of each update, and the largest number of tasks at once.

    At the end the cached updates are mixed into the model. The clients of rank r, which take turns, are r * clients,
    r * clients + 1, ...

    order:   the rank of each message at the server. A rank asks, pushes, asks, ... in turn
    batches: by rank, the batches that a task takes before its deadline; they weigh its update
    """
    w, version, cached, stale = problem.start.copy(), 0, [], []
    allowed = ceil(knobs.share * problem.ranks)
    turns: dict[int, int] = {}
    drawn = [0] * problem.ranks
    open_tasks: dict[int, tuple[np.ndarray, int]] = {}
    waiting: list[int] = []
    most = 0

    def mixed() -> np.ndarray:
        weights = np.array([n * (1 + t) ** -knobs.staleness for _, t, n in cached])
        u = sum(s * x for s, (x, _, _) in zip(weights, cached, strict=True)) / weights.sum()
        alpha = knobs.mixing * (1 + np.mean([t for _, t, _ in cached])) ** -knobs.staleness
        return alpha * u + (1 - alpha) * w

    for rank in order:
        if rank in open_tasks:
            base, of = open_tasks.pop(rank)
            client = rank * knobs.clients + turns.get(rank, 0) % knobs.clients
            turns[rank] = turns.get(rank, 0) + 1
            x = base.copy()
            done = batches[rank] if batches else knobs.local
            for _ in range(done):
                g = problem.grad(client, drawn[client] % problem.x.shape[1], x) + knobs.proximal * (x - base)
                drawn[client] += 1
                x = x - lr * g
            cached.append((x, version - of, done))
            stale.append(version - of)
            if len(cached) == knobs.cache:
                w, version, cached = mixed(), version + 1, []
        else:
            waiting.append(rank)
        while waiting and len(open_tasks) < allowed:
            open_tasks[waiting.pop(0)] = w, version
        most = max(most, len(open_tasks))
    return (mixed() if cached else w), stale, most
