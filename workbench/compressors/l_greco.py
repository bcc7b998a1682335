"""L-GreCo: a ratio per layer, chosen to send the fewest bytes for a given error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, nan
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from workbench.compressors._base import Compressor, inside
from workbench.compressors._ratio import RATIO_KNOBS, Way, ratio, ways
from workbench.compressors._split import by_part, gathered_parts, twice
from workbench.compressors._trial import tried
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.compressors.top_k import TopK
from workbench.rank import Bucket, Memory, Rank, outlined, values_of
from workbench.settings import knob

ERROR_BINS = 10_000  # parts into which the allowed error is divided


class _Row(NamedTuple):
    """The state of one parameter. Errors and sizes are sums over all ranks, by way."""

    steps: int = 0  # exchanges since the last measurement
    ways: tuple[Way, ...] = ()  # the measured ways; a choice outside them does not count
    errors: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()
    fresh: bool = False  # whether no choice was made since the measurement
    choice: Compressor | None = None


@dataclass(frozen=True, kw_only=True)
class LGreCo(Compressor):
    """Gives each layer its own ratio, so that all layers send the fewest bytes for a given total error.

        minimise   sum over layers of bytes(c_l)   subject to   sum over layers of ||x_l - C(x_l; c_l)||  <=  E
        E = budget * the same sum with one ratio for all layers, that of `of`

    x_l is the layer's input, residual included. Every `every` exchanges each rank tries the candidates on its own x_l.
    These are up to 5 ratios from 1 / `spread` to `spread` times that of `of`, or all choices of the knob. All ranks add
    up errors and bytes and solve the same problem. They use dynamic programming over 10,000 parts of E. Errors are
    rounded up. With budget = 1 the choice never has more measured error than one ratio for all layers, and never sends
    more. All layers keep the ratio of `of` until all are measured.

    `of` is any compressor with exactly one knob called density, rank, bits or levels. Layers with the same ratio are
    coded together, so a bucket needs one exchange per ratio. A measurement costs an all-reduce of 8 bytes per layer and
    candidate. It also codes the bucket once per candidate (more often for PowerSGD). Rank 0 records each decision in
    the Sample "ratio NAME". The bare name LGreCo means ErrorFeedback(of=LGreCo()).

    The authors' code measures rank 0's mean of 10 gradients and broadcasts rank 0's decision. It tries half to double
    the rank. Here the present values of all ranks count. A non-finite step decides nothing. With sizes only it cannot
    measure, so all layers keep the ratio of `of`.

    When to use it: for models with layers of very different size and shape.

    Reference: Markov, Alimohammadi, Frantar and Alistarh, "L-GreCo: Layerwise-Adaptive Gradient Compression for
    Efficient Data-Parallel Deep Learning", MLSys 2024, https://arxiv.org/abs/2210.17357
    """

    of: Compressor = knob(TopK(), doc="the compressor; layers start from its ratio and compare their errors with it")
    budget: float = knob(1.0, 0.1, 10.0, log=True, doc="allowed error, relative to that of one ratio for all layers")
    spread: float = knob(4.0, 1.0, 64.0, log=True, doc="largest factor between a layer's ratio and that of `of`")
    every: int = knob(100, 1, 10**6, unit="steps", log=True, doc="exchanges between two measurements")

    assumes: ClassVar[str] = "all layers keep one ratio"
    buffer: ClassVar[str] = "l_greco"
    drops: ClassVar[tuple[str, ...]] = ("l_greco",)

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def refuses(self) -> str | None:
        if ratio(self.of) is None:
            return (
                f"of={self.of}: LGreCo adjusts exactly one ratio, and this compressor has none or several; use a "
                f"compressor with one of {', '.join(RATIO_KNOBS)}, such as TopK or PowerSGD"
            )
        own = [type(c).__name__ for c in inside(self.of) if c.residual and not isinstance(c, ErrorFeedback)]
        if own:
            return (
                f"of={own[0]}: it has its own residual, so a trial cannot measure the error of a ratio; use a "
                f"compressor without a residual, such as TopK or PowerSGD"
            )
        return twice(self)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        rows: dict[str, _Row] = memory.parts.setdefault(self.buffer, {})
        every = ways(self.of, self.spread)
        names = [part.name for part in bucket.parts]
        if any(rows[name].fresh for name in names if name in rows):
            for name, value in self._decide(rows, every):
                if rank.index == 0:
                    await rank.sample(f"ratio {name}", value)
        rows.update({name: _one_more(rows.get(name, _Row())) for name in names})
        if len(every) > 1 and any(rows[name].steps >= self.every for name in names):
            table = await rank.all_reduce(_measured(bucket, every), "sum", bucket.name)
            rows.update({name: rows[name]._replace(steps=0) for name in names})
            table = values_of(table, otherwise=nan)
            if bool(table.isfinite().all()):
                errors, sizes = table.view(2, len(names), len(every)).tolist()
                for name, error, size in zip(names, errors, sizes, strict=True):
                    kept = rows[name].choice if rows[name].ways == every else None
                    rows[name] = _Row(0, every, tuple(error), tuple(size), fresh=True, choice=kept)
        mine = [rows[name].choice if rows[name].ways == every else None for name in names]
        return await by_part([choice or self.of for choice in mine], rank, bucket, memory)

    def _decide(self, rows: dict[str, _Row], every: tuple[Way, ...]) -> list[tuple[str, float]]:
        """Chooses for all layers measured with the present candidates: (name, ratio) of each."""
        known = [name for name, row in rows.items() if row.ways == every]
        for name, row in rows.items():
            rows[name] = row._replace(fresh=False)
        usual = next(i for i, way in enumerate(every) if way.of == self.of)
        errors, sizes = ([getattr(rows[name], what) for name in known] for what in ("errors", "sizes"))
        picks = chosen(errors, sizes, self.budget, usual)
        for name, pick in zip(known, picks, strict=True):
            rows[name] = rows[name]._replace(choice=every[pick].of)
        return [(name, every[pick].value) for name, pick in zip(known, picks, strict=True)]


def chosen(errors: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], budget: float, usual: int) -> list[int]:
    """Returns each layer's candidate. Candidates are in order of falling size. `usual` is one ratio for all layers.

    Returns `usual` if it is allowed and rounding leaves nothing better. If no choice is allowed, returns the candidate
    with the least error.
    """
    picks = cheapest(errors, sizes, budget * sum(error[usual] for error in errors))
    if picks is None:
        return [usual if budget >= 1 else min(range(len(e)), key=e.__getitem__) for e in errors]
    for i, pick in enumerate(picks):  # prefers `usual` over a choice that is no better
        if sizes[i][pick] >= sizes[i][usual] and errors[i][pick] >= errors[i][usual]:
            picks[i] = usual
    total = sum(size[pick] for size, pick in zip(sizes, picks, strict=True))
    return [usual] * len(picks) if budget >= 1 and total >= sum(size[usual] for size in sizes) else picks


def cheapest(errors: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], allowed: float) -> list[int] | None:
    """Returns the choice of least total size with a sum of errors up to `allowed`. Errors are rounded up to its parts.

    None if no choice fits. It only adds and compares, so the result is the same on every machine.
    """
    if not 0 < allowed < inf:
        return None
    least = torch.zeros(ERROR_BINS + 1, dtype=torch.float64)  # by the error used so far, the least size
    taken = []
    for error, size in zip(errors, sizes, strict=True):
        best, pick = torch.full_like(least, inf), torch.zeros(ERROR_BINS + 1, dtype=torch.uint8)
        for j, (e, s) in enumerate(zip(error, size, strict=True)):
            if e > allowed:
                continue
            w = ceil(e / allowed * ERROR_BINS)
            better = (with_it := least[: ERROR_BINS + 1 - w] + s) < best[w:]
            best[w:] = torch.where(better, with_it, best[w:])
            pick[w:][better] = j
        least = best
        taken.append(pick)
    if least[ERROR_BINS] == inf:
        return None
    left, picks = ERROR_BINS, []
    for error, pick in zip(reversed(errors), reversed(taken), strict=True):
        picks.append(int(pick[left]))
        left -= ceil(error[picks[-1]] / allowed * ERROR_BINS)
    return picks[::-1]


@outlined(lambda bucket, every: bucket.data.new_empty(2 * len(bucket.parts) * len(every), dtype=torch.float32))
def _measured(bucket: Bucket, every: tuple[Way, ...]) -> Tensor:
    """Returns errors and bytes of every candidate on every part: `(2 * parts * candidates,)` float32."""
    found = [[tried(way.of, gathered_parts(bucket, [part])) for way in every] for part in bucket.parts]
    errors = torch.stack([lost for row in found for lost, _ in row])
    return torch.cat([errors, errors.new_tensor([sent for row in found for _, sent in row])])


def _one_more(row: _Row) -> _Row:
    return row._replace(steps=row.steps + 1)
