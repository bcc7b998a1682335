"""NUQSGD: stochastic rounding to levels that halve towards zero."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workbench.compressors._levels import Levels, exponential
from workbench.rank import Memory
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class NUQSGD(Levels):
    """Sends every element as one of a few levels that halve towards zero, drawn so that its mean is kept.

        levels 0, +-m^s, ..., +-m^2, +-m, +-1 in units of the block's norm, m = `multiplier`

    C(x) is N times the level above or below x / N, as in QSGD. Exchange and bytes are also QSGD's: (p-1) (n bits / 8 +
    4 ceil(n / block)) sent per rank with "gather". With b bits s = 2^(b-1) - 2. Unbiased and without memory; any knob
    may be set at any step. With m = 1/2, the L2 norm and blocks of d elements,

        E |C(x) - x|^2 <= (1/8 + min(d / 4^(s+1), sqrt(d) / 2^s)) |x|^2

    so small elements add little error while d is well below 4^s: there it beats QSGD at equal bits. In larger blocks
    nearly all elements are below the smallest level, and it gets worse quickly. With the maximum norm QSGD is better on
    normal numbers. NUQSGD is better if few elements are much larger than the other ones.

    The authors' code has no zero level: set `grid` to "code". Then there are 2^b levels, down to +-m^(2^(b-1)-1). A
    zero element becomes plus or minus the smallest.

    When to use it: 3 or 4 bits in blocks of some 100 elements, or heavy tails.

    Reference: Ramezani-Kebrya, Faghri, Markov, Aksenov, Alistarh and Roy, "NUQSGD: Provably Communication-efficient
    Data-parallel SGD via Nonuniform Quantization", JMLR 22(114), 2021, https://jmlr.org/papers/v22/20-255.html;
    the authors' code: https://github.com/Tabrizian/learning-to-quantize
    """

    multiplier: float = knob(0.5, 0.1, 0.9, doc="each level as a share of the next larger one")
    grid: str = knob(
        "paper", choices=("paper", "code"), doc="paper: zero is a level; code: it is not, as in the authors' code"
    )

    def levels(self, memory: Memory) -> Tensor:
        return exponential(self.bits, self.multiplier, self.grid == "paper")
