"""A mixture of truncated normal distributions for normalised elements, and its best levels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MAX_HALVINGS = 20  # of an interval between levels; more halvings gain only quadratically little
MIN_LEVEL_GAP = 1e-6  # smallest distance of 2 levels that float32 can tell apart
MIN_GAIN = 1e-5  # a relative gain below this ends the sweeps


class Mixture(NamedTuple):
    """Blocks of elements. Each is a weighted normal distribution on [-1, 1]. The weights add up to 1."""

    weight: Tensor  # (k,) float64
    mean: Tensor
    sigma: Tensor

    @classmethod
    def of(cls, blocks: Tensor) -> Mixture:
        """Returns `(k, 3)`: each block's norm, and the mean and deviation of its normalised elements. Norms are the
        weights.
        """
        size, mean, sigma = blocks.double().unbind(-1)
        return cls(size / size.sum(), mean, sigma.clamp_min(1e-6))

    def mirrored(self) -> Mixture:
        """Returns the mixture with both signs equally likely."""
        return Mixture(
            torch.cat([self.weight, self.weight]) / 2,
            torch.cat([self.mean, -self.mean]),
            torch.cat([self.sigma, self.sigma]),
        )

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(...) -> integrals from -1 to x of 1, r and r^2 over the distribution of r: (...) each."""
        at, (_, mean, sigma), (below, scale) = x[..., None], self, self._cut()
        mass = self._below(at) - below
        here, low = self._bell(at), self._bell(-1.0)
        first = mean * mass - (here - low)
        second = (mean**2 + sigma**2) * mass - ((at + mean) * here - (mean - 1.0) * low)
        return (scale * mass).sum(-1), (scale * first).sum(-1), (scale * second).sum(-1)

    def _below(self, x: Tensor | float) -> Tensor:
        return torch.special.ndtr((x - self.mean) / self.sigma)

    def _bell(self, x: Tensor | float) -> Tensor:
        """The normal densities at x, times their variances."""
        z = (x - self.mean) / self.sigma
        return self.sigma * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

    def _cut(self) -> tuple[Tensor, Tensor]:
        """Returns each distribution's mass below -1, and its weight over its mass from -1 to 1: `(k,)`."""
        below = self._below(-1.0)
        return below, self.weight / (self._below(1.0) - below)

    def inverse(self, mass: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Returns the point between `low` and `high` with `mass` below it. Uses bisection, which ends for any input."""
        below, scale = self._cut()
        for _ in range(MAX_HALVINGS):
            middle = (low + high) / 2
            less = (scale * (self._below(middle[..., None]) - below)).sum(-1) < mass
            low, high = low.where(~less, middle), high.where(less, middle)
        return (low + high) / 2

    def variance(self, levels: Tensor) -> Tensor:
        """Returns the variance of random rounding, the mean of (l_(k+1) - r) (r - l_k): `(..., L)` from -1 to 1 ->
        `(...)`.
        """
        mass, first, second = (part.diff() for part in self.moments(levels))
        low, high = levels[..., :-1], levels[..., 1:]
        return ((low + high) * first - second - low * high * mass).sum(-1)


def descended(mixture: Mixture, levels: Tensor, sweeps: int) -> Tensor:
    """Returns levels after coordinate descent on the variance, `(starts, L)` -> `(starts, L)`. Both ends stay fixed.

        l_j <- F^-1( F(l_(j+1)) - the integral from l_(j-1) to l_(j+1) of (r - l_(j-1)) / (l_(j+1) - l_(j-1)) dF )

    This is the best place for l_j between its neighbours. Every second level moves at once, then the levels between. No
    2 neighbours move together, so the variance never grows. A level without mass around it moves to the middle.
    """
    levels, last = levels.clone(), levels.shape[-1] - 1
    before = mixture.variance(levels)
    for _ in range(sweeps):
        for start in (1, 2):
            low, high = levels[:, start - 1 : last - 1 : 2], levels[:, start + 1 :: 2]
            (below, first, _), (above, upto, _) = mixture.moments(low), mixture.moments(high)
            here = above - below
            best = mixture.inverse(above - (upto - first - low * here) / (high - low), low, high)
            best = best.where(here > 1e-12, (low + high) / 2)
            levels[:, start:last:2] = torch.clamp(best, low + MIN_LEVEL_GAP, high - MIN_LEVEL_GAP)
        after = mixture.variance(levels)
        if bool((after > (1 - MIN_GAIN) * before).all()):
            break
        before = after
    return levels


def apart(levels: Tensor) -> Tensor:
    """(..., L) ascending from -1 to 1 -> the same with at least MIN_LEVEL_GAP between any two."""
    steps = MIN_LEVEL_GAP * torch.arange(levels.shape[-1], dtype=levels.dtype)
    risen = (levels - steps).cummax(-1).values + steps
    risen[..., 0], risen[..., -1] = -1.0, 1.0
    return torch.clamp(risen, steps - 1.0, 1.0 - steps.flip(-1))
