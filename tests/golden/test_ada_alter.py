"""AdaAlter against its paper, and with one step per round against AdaGrad's rule read off the averaged gradient."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.golden.ada_alter import ada_alter
from tests.golden.driven import agree, trained
from tests.golden.problem import SGD, STEPS, Problem
from workbench.settings import Change
from workbench.strategies.ada_alter import AdaAlter

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("ranks", "every", "lr", "b0", "eps"), [
    (4, 4, 0.5, 1.0, 1.0), (3, 5, 0.2, 0.1, 0.5), (2, 7, 0.5, 2.0, 0.01), (1, 3, 0.3, 1.0, 1.0),
])  # fmt: skip
def test_it_is_its_papers_algorithm(ranks: int, every: int, lr: float, b0: float, eps: float) -> None:
    problem = Problem(ranks)
    mine = trained(problem, AdaAlter(every=every, initial=b0, eps=eps), partial(SGD, lr=lr))
    agree(mine, ada_alter(problem, lr, every, b0, eps))


def test_with_rounds_of_one_step_it_is_the_synchronous_rule() -> None:
    """x <- x - lr mean(g) / sqrt(b^2 + eps^2), b^2 <- b^2 + mean(g^2): the ranks are never apart."""
    problem, lr = Problem(3), 0.4
    x, b_squared, seen = problem.start.copy(), np.ones_like(problem.start), [np.tile(problem.start, (3, 1))]
    for step in range(STEPS):
        grads = np.stack([problem.grad(r, step, x) for r in range(3)])
        x = x - lr * grads.mean(0) / np.sqrt(b_squared + 0.7**2)
        b_squared = b_squared + (grads**2).mean(0)
        seen.append(np.tile(x, (3, 1)))
    agree(trained(problem, AdaAlter(every=1, eps=0.7), partial(SGD, lr=lr)), np.stack(seen))


def test_a_change_of_buckets_within_a_round_changes_nothing() -> None:
    problem = Problem(2)
    mine = trained(problem, AdaAlter(every=5), partial(SGD, lr=0.5), [Change(12, "bucket_mb", 1.0)])
    agree(mine, ada_alter(problem, 0.5, 5, 1.0, 1.0))
