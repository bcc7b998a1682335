"""AMQ: levels that shrink towards zero by a factor, refitted during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._fitted import Fitted
from workbench.compressors._mixture import Mixture


@dataclass(frozen=True, kw_only=True)
class AMQ(Fitted):
    """Sends every element as one of the levels `+-1, +-m, +-m^2, ...`, and fits m while training.

        m minimises the mean of (l_(k+1) - r) (r - l_k) over r, an element in units of its block's norm

    It is NUQSGD without a zero and with a fitted multiplier: one number instead of ALQ's 2^bits - 2. The distribution
    of r is ALQ's mixture, made symmetric. Gradient descent makes 50 steps at rate 0.7 from each of 19 multipliers
    between 0.05 and 0.95. The best of all starts and ends is taken. With 8 bits the steps hardly move, so it needs many
    starts. Exchange, bytes, samples and live changes are ALQ's. Unbiased.

    When to use it: instead of ALQ, if one number should describe the levels. A zero element becomes plus or minus the
    smallest level. The authors' code has 8 starts. It compares ends without the rounding error between the two smallest
    levels, where most elements are. Here this error counts.

    Reference: Faghri, Tabrizian, Markov, Alistarh, Roy and Ramezani-Kebrya, "Adaptive Gradient Quantization for
    Data-Parallel SGD", NeurIPS 2020, https://arxiv.org/abs/2010.12460; the authors' code:
    https://github.com/Tabrizian/learning-to-quantize
    """

    steps: ClassVar[int] = 50
    rate: ClassVar[float] = 0.7

    def solved(self, mixture: Mixture) -> Tensor:
        starts = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
        found = powers(torch.cat([starts, self.multiplied(mixture.mirrored(), starts)]), self.bits)
        best: Tensor = found[mixture.variance(found).argmin()]
        return best

    def multiplied(self, mixture: Mixture, m: Tensor) -> Tensor:
        """Returns the results of gradient descent from starting multipliers: `(k,)` -> `(k,)`."""
        for _ in range(self.steps):
            m = (m - self.rate * slope(mixture, m, 2 ** (self.bits - 1) - 1)).clamp(0.01, 0.99)
        return m


def powers(m: Tensor, bits: int) -> Tensor:
    """Returns `-1, -m, -m^2, ..., m^2, m, 1`: `(k,)` -> `(k, 2^bits)`."""
    down = m[:, None] ** torch.arange(2 ** (bits - 1), dtype=m.dtype)
    return torch.cat([-down, down.flip(-1)], -1)


def slope(mixture: Mixture, m: Tensor, s: int) -> Tensor:
    """Returns d/dm of the mean of (l_(k+1) - r) (r - l_k) over r in `[0, 1]`: `(k,)` -> `(k,)`. Levels are `+-1, +-m,
    ..., +-m^s`.
    """
    j = torch.arange(s, dtype=m.dtype)
    m = m[:, None]
    mass, first, _ = mixture.moments(m ** torch.arange(s + 1, dtype=m.dtype))
    between = (j * m ** (j - 1) + (j + 1) * m**j) * -first.diff() + (2 * j + 1) * m ** (2 * j) * mass.diff()
    middle = 2 * s * m[:, 0] ** (2 * s - 1) * (mass[:, -1] - mixture.moments(torch.zeros(1, dtype=m.dtype))[0])
    return between.sum(-1) + middle
