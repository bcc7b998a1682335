"""What a stretch of codec work takes: so much a byte, or a line, of which a part is of every stretch, however small."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

APART = 2.0  # times the smallest: how large the largest must be for a line to be told from sizes
LITTLE = 0.01  # of the shortest stretch: less that all have in common is none


class Line(NamedTuple):
    """Seconds of every stretch, and more for each byte."""

    stretch: float
    byte: float


Price = float | Line  # a bare number: seconds per byte


def taken(price: Price, nbytes: int) -> float:
    """Seconds that so many bytes take.

    >>> taken(2e-9, 1_000_000), taken(Line(0.001, 2e-9), 1_000_000)
    (0.002, 0.003)
    """
    return price.stretch + price.byte * nbytes if isinstance(price, Line) else price * nbytes


def priced(found: Iterable[tuple[int, float]], middle: Callable[[list[float]], float]) -> Price:
    """What fits stretches of (bytes, seconds): a line where their sizes tell one, else the middle of seconds per byte.

    middle: of several numbers. A line is fitted by least squares over the middle of each size, relative errors, as
    many times as it was found; neither of its numbers is negative.
    """
    by = defaultdict[int, list[float]](list)
    for nbytes, seconds in found:
        by[nbytes].append(seconds)
    each = middle([seconds / nbytes for nbytes, many in by.items() for seconds in many])
    if not each or max(by) < APART * min(by):
        return each
    x, y = np.array([(1.0, nbytes) for nbytes in by]), np.array([middle(many) for many in by.values()])
    weight = np.sqrt([len(many) for many in by.values()]) / np.maximum(y, 1e-9)
    line = Line(*not_negative(x * weight[:, None], y * weight))
    return line if line.stretch > LITTLE * y.min() else each


def not_negative(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Least squares in two unknowns that cannot be negative; x: (rows, 2), y: (rows,)."""
    both, *_ = np.linalg.lstsq(x, y, rcond=None)
    if len(y) > 1 and np.linalg.matrix_rank(x) == 2 and (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [(float(x[:, k] @ y / (x[:, k] @ x[:, k])) if (x[:, k] @ x[:, k]) else 0.0) for k in (0, 1)]
    left = [float(np.sum((y - alone[k] * x[:, k]) ** 2)) for k in (0, 1)]
    return (0.0, max(alone[1], 0.0)) if left[1] <= left[0] else (max(alone[0], 0.0), 0.0)
