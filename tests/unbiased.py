"""Tests whether the mean of many draws equals the source: one statistic for all unbiased codecs."""

from __future__ import annotations

import torch


def assert_unbiased(off: torch.Tensor) -> None:
    """Checks that the mean error of independent draws is within chance. off: (draws, n)

    U = T ||mean error||^2 / mean ||error||^2 is 1 on average, with a spread of sqrt(2 / degrees of freedom).
    """
    draws, off = len(off), off.double()
    spread = off.square().mean(0)
    if not float(spread.sum()):
        return  # exact
    u = draws * off.mean(0).square().sum() / spread.sum()
    freedom = spread.sum() ** 2 / spread.square().sum()
    assert abs(u - 1) < 5 * (2 / freedom) ** 0.5 + 5 / draws**0.5, (float(u), float(freedom))
