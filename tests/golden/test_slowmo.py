"""SlowMo against its paper: the state of the base optimizer, and a rate that changes between two rounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.golden.driven import agree, trained
from tests.golden.problem import SGD, AdamW, Problem
from tests.golden.slowmo import slowmo
from workbench.settings import Change
from workbench.strategies import SlowMo

pytestmark = pytest.mark.ranks

nesterov = partial(SGD, lr=0.05, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(("ranks", "tau", "beta", "alpha", "buffers", "inner"), [
    (4, 6, 0.7, 1.0, "zero", nesterov),
    (3, 4, 0.5, 0.8, "average", nesterov),
    (3, 5, 0.5, 1.0, "keep", partial(AdamW, lr=0.02)),
    (4, 4, 0.4, 1.0, "average", partial(AdamW, lr=0.02)),
    (3, 1, 0.6, 0.9, "keep", partial(SGD, lr=0.1)),
])  # fmt: skip
def test_it_is_its_papers_algorithm(ranks: int, tau: int, beta: float, alpha: float, buffers: str, inner: Any) -> None:
    problem = Problem(ranks)
    mine = trained(problem, SlowMo(every=tau, beta=beta, alpha=alpha, buffers=buffers), inner)
    agree(mine, slowmo(problem, inner, tau, beta, alpha, buffers))


def test_u_is_in_units_of_gradients_when_the_rate_changes() -> None:
    problem, inner = Problem(3), partial(SGD, lr=0.1)
    mine = trained(problem, SlowMo(every=5, beta=0.6), inner, [Change(15, "lr", 0.02), Change(30, "lr", 0.15)])
    agree(mine, slowmo(problem, inner, 5, 0.6, 1.0, rates={15: 0.02, 30: 0.15}))
