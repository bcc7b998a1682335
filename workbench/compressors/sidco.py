"""SIDCo: a threshold from a fitted distribution of the magnitudes, without sorting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.compressors._select import above
from workbench.compressors._sparse import Sparse
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory
from workbench.settings import knob

FIRST_SHARE = 0.25  # the share that the first of several fits aims at
JUDGE_INTERVAL = 5  # exchanges between judgements of the number of fits
SHARE_TOLERANCE = 0.2  # tolerated relative error of the sent share


@dataclass(frozen=True, kw_only=True)
class SIDCo(Sparse):
    """Sends about density * n entries of each bucket, which reach a fitted distribution's quantile.

        exponential:  t = mean * ln(1 / r)
        pareto:       t = scale * (r^-shape - 1) / shape,   shape = (1 - mean^2 / var) / 2, scale = mean * (1 - shape)
        gamma:        t = the value exceeded by a share r of a gamma distribution of equal mean and mean logarithm

    r is the share that should exceed t; mean and variance are those of the magnitudes. One fit is right only if the
    distribution keeps its form up to the tail, so several fits are possible. The first aims at 25 % of the entries.
    Each further fit uses the excesses over the last threshold and aims at its part of the surplus. ("gamma" continues
    with pareto.) `stages` is their number. With 0 each bucket begins with 2 fits and gets one more whenever 5 exchanges
    were off by 20 % on average.

    Bytes sent: (p-1) * (8 + 8 k_i) by a rank with k_i entries of at least t. Biased: the bare name SIDCo means
    ErrorFeedback(of=SIDCo()). The largest entry is always sent, so every bucket sends something.

    When to use it: to compare. It needs only means and shares and neither sorts nor samples. On a CPU the second fit,
    over 25 % of the entries, takes longer than TopK's whole exact search. GPUs have not been measured here.

    The authors' number of fits belongs to the process. It falls if too much was sent, although heavy tails then need
    more fits. Here it belongs to the bucket's parameters. Their later fits have fixed shares. Here each compensates the
    error of the fits before. Their gamma threshold is exact for shape 1 only. Here it is the quantile. Fits ignore
    zeros. Their code fails if no entry reaches a threshold.

    Reference: Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression Technique
    for Distributed Training Systems", MLSys 2021, https://arxiv.org/abs/2101.10761
    """

    density: float = knob(0.01, 0.0001, 1.0, log=True, doc="target fraction of the entries that are sent")
    fit: str = knob("exponential", choices=("exponential", "pareto", "gamma"), doc="the distribution of magnitudes")
    stages: int = knob(
        0, 0, 14, unit="fits", doc="number of fits, each to the entries above the last threshold; 0: chosen by itself"
    )

    contraction: ClassVar[bool] = True
    buffer: ClassVar[str] = "sidco"
    drops: ClassVar[tuple[str, ...]] = ("sidco",)

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def choose(self, x: Tensor, memory: Memory, bucket: Bucket) -> tuple[Tensor, Tensor]:
        known = memory.parts.setdefault(self.buffer, {})
        name = bucket.parts[0].name if bucket.parts else bucket.name
        stages, ratios = known.get(name, (2, ()))
        wanted = max(1, round(self.density * x.numel()))
        size = x.abs()
        index = above(x, self.threshold_of(size, wanted, self.stages or stages))
        if not index.numel():
            index = size.argmax()[None]
        index = index[x[index] != 0]
        judged = _judged(stages, ratios, index.numel() / wanted, self.density)
        known.update((part.name, judged) for part in bucket.parts)
        return index, x[index]

    def threshold_of(self, size: Tensor, wanted: int, stages: int) -> float:
        """Returns the threshold that about `wanted` of the magnitudes `(n,)` exceed, by `stages` fits."""
        size = size.float()
        if not bool(size.sum().isfinite()):
            size = size.nan_to_num(0.0, 0.0, 0.0)
        if not float(size.min()):
            size = size[size.nonzero().flatten()]
        count = size.numel()
        if count <= wanted:
            return 0.0
        if stages == 1 or wanted >= FIRST_SHARE * count:
            return _FITS[self.fit](size, wanted / count)
        t = _FITS[self.fit](size, FIRST_SHARE)
        later = _exponential if self.fit == "exponential" else _pareto
        for left in range(stages - 1, 0, -1):
            over = size[above(size, t)]
            if not over.numel():
                break
            t = max(0.0, t + later(over - t, (wanted / over.numel()) ** (1 / left)))
            size = over
        return t


def _judged(stages: int, ratios: tuple[float, ...], ratio: float, density: float) -> tuple[int, tuple[float, ...]]:
    """Returns the number of fits, and the ratios of sent to wanted entries since the last judgement."""
    ratios = (*ratios, ratio)
    if len(ratios) < JUDGE_INTERVAL:
        return stages, ratios
    off = abs(sum(ratios) / JUDGE_INTERVAL - 1) > SHARE_TOLERANCE
    return min(stages + off, max(2, math.ceil(-math.log2(density)))), ()


def _exponential(size: Tensor, ratio: float) -> float:
    """The value that a share `ratio` of an exponential distribution with the mean of `size` exceeds."""
    return -math.log(ratio) * float(size.mean())


def _pareto(size: Tensor, ratio: float) -> float:
    """Like `_exponential`, but with the generalised Pareto distribution of equal mean and variance."""
    var, mean = (float(v) for v in torch.var_mean(size, correction=0))
    shape = (1 - mean * mean / var) / 2 if var > 0 else -math.inf
    if shape < -1e3:
        return mean  # all equal
    if ratio >= 1 or abs(shape) < 1e-6:
        return _exponential(size, ratio)
    return mean * (1 - shape) * math.expm1(-shape * math.log(ratio)) / shape


def _gamma(size: Tensor, ratio: float) -> float:
    """Like `_exponential`, but with the gamma distribution of equal mean and nearly equal mean logarithm."""
    mean = float(size.mean())
    s = math.log(mean) - float(size.log().mean())
    if not s > 1e-6:
        return mean  # all equal
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return mean / shape * _gamma_quantile(shape, ratio)


def _gamma_quantile(shape: float, ratio: float) -> float:
    """The value that a share `ratio` of the gamma distribution of this shape and scale 1 exceeds, in 3 refinements."""
    low, high = -80.0, math.log(shape + 1) + 6.0  # bounds of its logarithm
    a = torch.tensor(shape, dtype=torch.float64)
    for _ in range(3):
        grid = torch.linspace(low, high, 65, dtype=torch.float64)
        at = int((torch.special.gammaincc(a, grid.exp()) > ratio).sum())
        low, high = float(grid[max(at - 1, 0)]), float(grid[min(at, 64)])
    return math.exp((low + high) / 2)


_FITS: dict[str, Callable[[Tensor, float], float]] = {
    "exponential": _exponential,
    "pareto": _pareto,
    "gamma": _gamma,
}
