"""ALQ: quantisation levels refitted to the gradients' elements during training."""

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
    """Sends every element as one of a few levels, placed so that rounding adds the least variance.

        the levels minimise the mean of (l_(k+1) - r) (r - l_k) over r, an element in units of its block's norm

    r is modelled as a mixture of normal distributions on [-1, 1]. Each of `samples` blocks gives one, weighted with the
    block's norm. Coordinate descent moves each level to its best place between its neighbours. The place has a closed
    form, up to the inverse of the distribution function. It makes up to 30 sweeps from levels of equal mass, from
    equally spaced ones and from halving ones. It takes the best result. Unbiased: random rounding keeps the mean for
    any levels.

    Exchange and bytes are QSGD's: (p-1) (n bits / 8 + 4 ceil(n / block)) sent per rank with "gather". After steps 0,
    100, 2000 and every 10,000 steps it samples. That takes 12 (p-1) more bytes per sampled block of each bucket. Any
    knob may change at any step. Other bits get levels at once, from the last sample. Another block or norm needs a new
    sample, during one step with levels fitted to each bucket.

    When to use it: 2 to 4 bits in large blocks, where fixed levels do not suit. There it is hardly worse than in small
    blocks. By default the authors' code moves levels by finite differences. It fits a level at 0 that it then drops for
    symmetric levels, and may leave a short last block unquantised.

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
