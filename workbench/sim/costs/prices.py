"""Prices of a stretch of codec work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

MIN_SIZE_RATIO = 2.0  # of the largest to the smallest size, for a Line
MIN_FIXED_SHARE = 0.01  # of the shortest stretch: a smaller fixed part counts as none


class Line(NamedTuple):
    """Seconds per stretch, and seconds per byte."""

    stretch: float
    byte: float


Price = float | Line  # a bare number: seconds per byte


def price_bytes(price: Price, nbytes: int) -> float:
    """Returns the seconds for `nbytes` bytes.

    >>> price_bytes(2e-9, 1_000_000), price_bytes(Line(0.001, 2e-9), 1_000_000)
    (0.002, 0.003)
    """
    return price.stretch + price.byte * nbytes if isinstance(price, Line) else price * nbytes


def fit_price(found: Iterable[tuple[int, float]], middle: Callable[[list[float]], float]) -> Price:
    """Fits a price to stretches of (bytes, seconds): a Line if the sizes differ enough, else seconds per byte.

    middle: reduces several numbers to one. The Line has the least squares of relative errors of each size's middle,
    weighted by its count. Neither of its numbers is negative.
    """
    by = defaultdict[int, list[float]](list)
    for nbytes, seconds in found:
        by[nbytes].append(seconds)
    each = middle([seconds / nbytes for nbytes, many in by.items() for seconds in many])
    if not each or max(by) < MIN_SIZE_RATIO * min(by):
        return each
    x, y = np.array([(1.0, nbytes) for nbytes in by]), np.array([middle(many) for many in by.values()])
    weight = np.sqrt([len(many) for many in by.values()]) / np.maximum(y, 1e-9)
    line = Line(*solve_not_negative(x * weight[:, None], y * weight))
    return line if line.stretch > MIN_FIXED_SHARE * y.min() else each


def solve_not_negative(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Least squares in two non-negative unknowns; x: (rows, 2), y: (rows,)"""
    both, *_ = np.linalg.lstsq(x, y, rcond=None)
    if len(y) > 1 and np.linalg.matrix_rank(x) == 2 and (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [(float(x[:, k] @ y / (x[:, k] @ x[:, k])) if (x[:, k] @ x[:, k]) else 0.0) for k in (0, 1)]
    left = [float(np.sum((y - alone[k] * x[:, k]) ** 2)) for k in (0, 1)]
    return (0.0, max(alone[1], 0.0)) if left[1] <= left[0] else (max(alone[0], 0.0), 0.0)
