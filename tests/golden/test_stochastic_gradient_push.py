"""Stochastic gradient push against its paper: regular graphs and one that is not, late messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.golden.driven import agree, trained
from tests.golden.problem import SGD, Problem
from tests.golden.stochastic_gradient_push import chain, exponential, push, ring, shares
from workbench.strategies import StochasticGradientPush

pytestmark = pytest.mark.ranks

plain = partial(SGD, lr=0.1)
heavy = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.05)
uneven = shares([[1, 2], [2], [0]])  # "0>1 0>2 1>2 2>0"
weighed = np.array([[0.6, 0.0, 0.3], [0.3, 0.8, 0.0], [0.1, 0.2, 0.7]])


@pytest.mark.parametrize(("ranks", "graph", "said", "every", "overlap", "inner"), [
    (4, exponential, {"graph": "exponential"}, 1, 0, heavy),
    (3, exponential, {"graph": "exponential"}, 2, 0, plain),
    (4, ring, {"graph": "ring"}, 1, 2, plain),
    (4, exponential, {"graph": "exponential"}, 3, 1, plain),
    (4, chain, {"graph": "chain"}, 1, 0, heavy),
    (3, lambda p, k: uneven, {"edges": "0>1 0>2 1>2 2>0"}, 2, 3, heavy),
    (3, lambda p, k: weighed, {"edges": "0.6 0 0.3; 0.3 0.8 0; 0.1 0.2 0.7"}, 1, 0, plain),
], ids=["exponential", "every 2", "ring late", "every 3 late", "chain", "edges late", "weights"])  # fmt: skip
def test_it_is_its_papers_algorithm(
    ranks: int, graph: Any, said: dict[str, str], every: int, overlap: int, inner: Any
) -> None:
    problem = Problem(ranks)
    mine = trained(problem, StochasticGradientPush(**said, every=every, overlap=overlap), inner)
    agree(mine, push(problem, inner, graph, every, overlap))
