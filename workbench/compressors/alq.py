"""ALQ: levels placed where gradients' elements are, again and again while training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._fitted import Fitted
from workbench.compressors._levels import exponential
from workbench.compressors._mixture import Mixture, apart, descended


@dataclass(frozen=True, kw_only=True)
class ALQ(Fitted):
    """Every element crosses the wire as one of a few levels, which lie where rounding to them costs least.

        the levels minimise the mean of (l_(k+1) - r) (r - l_k) over r, an element in units of its block's norm

    r is taken for a mixture of normal distributions on [-1, 1], one for each of `samples` blocks, weighted with the
    blocks' norms. Coordinate descent: each level goes to its best place between its neighbours, for which there is a
    closed form up to the inverse of the distribution function; up to 30 sweeps from levels of equal mass, equally
    spaced ones and halving ones; the best end is taken. Unbiased: rounding at random keeps the mean whatever the
    levels.

    Exchange and bytes are QSGD's: (p-1) (n bits / 8 + 4 ceil(n / block)) sent per rank with "gather". In the few steps
    in which it samples, after 0, 100, 2000 and every 10,000 steps, 12 (p-1) bytes more for each sampled block of each
    bucket. Any knob may be set at any step: other bits are solved for at once, from the last sample; another block
    or norm is sampled anew, for one step with levels fitted to each bucket by itself.

    When to use it: two to four bits in large blocks, where fixed levels no longer suit; there it is hardly worse than
    in small ones. The authors' code moves levels by finite differences unless told otherwise, fits a level at 0 that
    it then drops where levels shall be symmetric, and may leave a short last block as it is; nothing of that here.

    Reference: Faghri, Tabrizian, Markov, Alistarh, Roy and Ramezani-Kebrya, "Adaptive Gradient Quantization for
    Data-Parallel SGD", NeurIPS 2020, https://arxiv.org/abs/2010.12460; the authors' code:
    https://github.com/Tabrizian/learning-to-quantize
    """

    sweeps: ClassVar[int] = 30

    def solved(self, mixture: Mixture) -> Tensor:
        even = torch.linspace(-1.0, 1.0, 2**self.bits, dtype=torch.float64)
        likely = mixture.inverse((even + 1.0) / 2, even.new_tensor(-1.0), even.new_tensor(1.0))
        starts = torch.stack([likely, even, exponential(self.bits, 0.5, zero=False).double()])
        ends = descended(mixture, apart(starts), self.sweeps)
        best: Tensor = ends[mixture.variance(ends).argmin()]
        return best
