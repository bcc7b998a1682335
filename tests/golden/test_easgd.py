"""EASGD against its paper, the synchronous form: the ranks' parameters, and the centre that is left behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.golden.driven import NEAR, agree, trained
from tests.golden.easgd import easgd
from tests.golden.problem import SGD, STEPS, Problem
from workbench.settings import Change
from workbench.strategies import EASGD

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("ranks", "tau", "beta", "inner"), [
    (4, 1, 0.9, partial(SGD, lr=0.1)),
    (3, 4, 0.9, partial(SGD, lr=0.1)),
    (4, 7, 0.5, partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)),
])  # fmt: skip
def test_it_is_its_papers_algorithm(ranks: int, tau: int, beta: float, inner: Any) -> None:
    problem = Problem(ranks)
    agree(trained(problem, EASGD(every=tau, beta=beta), inner), easgd(problem, inner, tau, beta)[0])


def test_whoever_leaves_goes_on_from_the_centre_after_one_more_exchange() -> None:
    problem, inner = Problem(4), partial(SGD, lr=0.1)
    mine = trained(problem, EASGD(every=4, beta=0.6), inner, [Change(STEPS, "strategy", "DDP")])
    path, centres = easgd(problem, inner, 4, 0.6)
    agree(mine[:-1], path[:-1])
    left = centres[-1] + 0.15 * (path[-1] - centres[-1]).sum(0)
    np.testing.assert_allclose(mine[-1], np.tile(left, (4, 1)), rtol=0, atol=NEAR * np.abs(left).max())
