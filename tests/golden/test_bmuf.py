"""BMUF against its paper: both forms of block momentum, and a rate that changes between two blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.golden.bmuf import bmuf
from tests.golden.driven import agree, trained
from tests.golden.problem import SGD, Problem
from workbench.settings import Change
from workbench.strategies import BMUF

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("ranks", "every", "eta", "zeta", "nesterov", "inner"), [
    (4, 4, 0.75, 1.0, False, partial(SGD, lr=0.1)),
    (3, 6, 0.6, 0.9, True, partial(SGD, lr=0.05, momentum=0.9)),
    (4, 1, 0.75, 0.5, True, partial(SGD, lr=0.1)),
])  # fmt: skip
def test_it_is_its_papers_algorithm(
    ranks: int, every: int, eta: float, zeta: float, nesterov: bool, inner: Any
) -> None:
    problem = Problem(ranks)
    mine = trained(problem, BMUF(every=every, eta=eta, zeta=zeta, form="nesterov" if nesterov else "classical"), inner)
    agree(mine, bmuf(problem, inner, every, eta, zeta, nesterov))


def test_delta_is_in_units_of_parameters_when_the_rate_changes() -> None:
    problem, inner = Problem(3), partial(SGD, lr=0.1)
    mine = trained(problem, BMUF(every=5, eta=0.6), inner, [Change(15, "lr", 0.02)])
    agree(mine, bmuf(problem, inner, 5, 0.6, 1.0, rates={15: 0.02}))
