"""DiLoCo against its paper: rounds of several lengths, outer momenta, inner optimizers that keep their state."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.golden.diloco import diloco
from tests.golden.driven import agree, trained
from tests.golden.problem import SGD, AdamW, Problem
from workbench.strategies import DiLoCo

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("ranks", "every", "outer_lr", "momentum", "nesterov", "inner"), [
    (4, 5, 0.7, 0.9, True, partial(AdamW, lr=0.02)),
    (3, 7, 0.4, 0.8, True, partial(SGD, lr=0.1, momentum=0.9)),
    (3, 1, 1.0, 0.9, True, partial(SGD, lr=0.1)),
    (4, 4, 0.8, 0.6, False, partial(SGD, lr=0.1)),
    (3, 8, 1.3, 0.0, True, partial(SGD, lr=0.1)),
])  # fmt: skip
def test_it_is_its_papers_algorithm(
    ranks: int, every: int, outer_lr: float, momentum: float, nesterov: bool, inner: Any
) -> None:
    problem = Problem(ranks)
    form = "nesterov" if nesterov else "heavy-ball"
    mine = trained(problem, DiLoCo(every=every, outer_lr=outer_lr, outer_momentum=momentum, form=form), inner)
    agree(mine, diloco(problem, inner, every, outer_lr, momentum, nesterov))
