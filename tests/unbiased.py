"""Is the mean of many draws what was drawn from? One statistic, for whatever claims to be unbiased."""

from __future__ import annotations

import torch


def assert_unbiased(off: torch.Tensor) -> None:
    """(draws, n) errors of independent draws: the mean error is no larger than chance would have it.

    U = T ||mean error||^2 / mean ||error||^2 is 1 on average, with a spread of sqrt(2 / degrees of freedom).
    """
    draws, off = len(off), off.double()
    spread = off.square().mean(0)
    if not float(spread.sum()):
        return  # exact
    u = draws * off.mean(0).square().sum() / spread.sum()
    freedom = spread.sum() ** 2 / spread.square().sum()
    assert abs(u - 1) < 5 * (2 / freedom) ** 0.5 + 5 / draws**0.5, (float(u), float(freedom))
