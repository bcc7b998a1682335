"""Streaming DiLoCo against its paper: fragments in turn, late, mixed with what ranks have, and in four bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.golden.driven import agree, trained
from tests.golden.problem import SGD, AdamW, Problem
from tests.golden.streaming_diloco import streaming
from workbench.strategies import StreamingDiLoCo

pytestmark = pytest.mark.ranks

plain = partial(SGD, lr=0.1)


@pytest.mark.parametrize(("ranks", "every", "fragments", "tau", "alpha", "outer_lr", "momentum", "inner"), [
    (4, 8, 2, 2, 0.5, 0.7, 0.9, partial(AdamW, lr=0.02)),
    (3, 6, 2, 1, 0.25, 0.4, 0.8, partial(SGD, lr=0.05, momentum=0.9)),
    (3, 10, 4, 0, 0.0, 0.7, 0.9, plain),
    (3, 7, 3, 4, 0.5, 0.7, 0.9, plain),
    (4, 5, 1, 3, 0.3, 1.0, 0.0, plain),
])  # fmt: skip
def test_it_is_its_papers_algorithm(
    ranks: int, every: int, fragments: int, tau: int, alpha: float, outer_lr: float, momentum: float, inner: Any
) -> None:
    problem = Problem(ranks)
    chosen = StreamingDiLoCo(every=every, fragments=fragments, delay=tau, alpha=alpha, outer_lr=outer_lr,
                             outer_momentum=momentum, bits=32)  # fmt: skip
    agree(trained(problem, chosen, inner), streaming(problem, inner, every, fragments, tau, alpha, outer_lr, momentum))


@pytest.mark.parametrize(("ranks", "tau"), [(4, 2), (3, 0)], ids=["whole chunks", "a chunk that is shorter"])
def test_in_four_bits_it_is_the_papers_algorithm_with_what_those_hold(ranks: int, tau: int) -> None:
    """As exact as float64, because the fp32 scales and sums are the same numbers in the same order."""
    problem = Problem(ranks)
    chosen = StreamingDiLoCo(every=8, fragments=2, delay=tau, alpha=0.5, bits=4)
    agree(trained(problem, chosen, plain), streaming(problem, plain, 8, 2, tau, 0.5, 0.7, 0.9, four_bits=True))
