"""A switch between two methods loses nothing of float64: parameters, outer momentum, what optimizers remember."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.golden.driven import agree, trained
from tests.golden.handover import slowmo_then_diloco
from tests.golden.problem import SGD, AdamW, Problem
from workbench.settings import Change
from workbench.strategies import SlowMo

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("inner", [partial(SGD, lr=0.05, momentum=0.9), partial(AdamW, lr=0.02)], ids=["sgd", "adamw"])
def test_diloco_goes_on_with_slowmos_momentum(inner: Any) -> None:
    problem = Problem(3)
    change = Change(20, "strategy", {"DiLoCo": {"every": 5, "outer_lr": 0.5, "outer_momentum": 0.8}})
    mine = trained(problem, SlowMo(every=5, beta=0.6), inner, [change])
    agree(mine, slowmo_then_diloco(problem, inner, 5, 20, 0.6, 0.5, 0.8))
