"""Cuts a row of parts so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

IMPOSSIBLE = float("inf")
MAX_KEPT = 50  # cuts per number of parts

Numbers = tuple[float, ...]


class StageCut(NamedTuple):
    """The slowest stage's time, the cost of crossings, and the first parts of pieces."""

    slowest: float
    crosses: float
    cuts: tuple[int, ...]


class _PartialCut(NamedTuple):
    """The first parts' cut.

    costs: the slowest complete stage, the cost of crossings, and the time so far of each incomplete stage
    """

    costs: Numbers
    cuts: tuple[int, ...]


def find_balanced_cut(times: Sequence[Sequence[float]], count: int, together: Collection[int] = (),
             barren: Collection[int] = ()) -> tuple[int, ...]:  # fmt: skip
    """Returns the parts at which pieces 1, 2, ... begin in the fastest cut; see `find_pareto_cuts`.

    >>> find_balanced_cut([[1, 1, 1, 1, 4]], 2), find_balanced_cut([[3, 3, 3, 3], [1, 1, 1, 1]], 2)
    ((4,), (1,))
    """
    return find_pareto_cuts(times, count, together, barren)[0][0].cuts


def find_pareto_cuts(
    times: Sequence[Sequence[float]],
    count: int,
    together: Collection[int] = (),
    barren: Collection[int] = (),
    stages: int = 0,
    crossing: Sequence[Sequence[float]] = ((),),
) -> tuple[list[StageCut], bool]:
    """Returns the Pareto-optimal cuts by slowest stage and crossing cost, the fastest first; and if they are exact.

    times:    the time of each part, in any unit; one row per piece if it depends on the rank; rows repeat
    together: parts that must join the part before them
    barren:   parts without training; each piece needs another part
    stages:   piece k is on stage k modulo this number; 0: each piece is a stage
    crossing: the cost of a piece that begins at each part, in any unit; rows as in `times`; empty: no cost

    Dynamic programming cuts the first n parts into k pieces from the best cuts into k - 1. It drops a cut if another is
    as good in every cost that still counts. Several pieces per stage can leave more than MAX_KEPT cuts. Then only the
    fastest go on, and the second result is False. Among equal cuts the earliest last piece wins. Raises ValueError if
    no cut is allowed.

    Reference: with one piece per stage, one rank per stage and no crossing cost, it is the optimizer of Narayanan et
    al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
    https://doi.org/10.1145/3341301.3359646

    >>> find_pareto_cuts([[1, 1, 1, 1]], 2, crossing=[[0, 1, 9, 8]])[0]
    [StageCut(slowest=2.0, crosses=9, cuts=(2,)), StageCut(slowest=3, crosses=1, cuts=(1,))]
    """
    n, stages = len(times[0]), stages or count
    sums = [[0.0, *accumulate(row)] for row in times]
    bears = [0, *accumulate(part not in barren for part in range(n))]
    begins = [at for at in range(1, n) if at not in together]
    exact = True

    def further(begun: Iterable[_PartialCut], piece: int, begin: int, end: int) -> Iterator[_PartialCut]:
        if bears[end] == bears[begin]:
            return
        row, paid = sums[piece % len(sums)], crossing[piece % len(crossing)]
        took, crosses = row[end] - row[begin], paid[begin] if piece and paid else 0
        for (slowest, crossed, *open_), cuts in begun:
            ahead = list(open_) if piece >= stages else [*open_, 0]
            mine = ahead.pop(0 if piece >= stages else -1) + took
            more = [mine] if piece + stages < count else []
            costs = (slowest if more else max(slowest, mine), crossed + crosses, *ahead, *more)
            yield _PartialCut(costs, (*cuts, begin) if piece else ())

    best = {end: list(further([_PartialCut((0, 0), ())], 0, 0, end)) for end in range(1, n + 1)}
    for piece in range(1, count):
        found = {}
        for end in range(piece + 1, n + 1):
            ways = (way for at in begins if at < end and at in best for way in further(best[at], piece, at, end))
            found[end], whole = _drop_dominated(ways)
            exact = exact and whole
        best = found
    if not best.get(n):
        raise ValueError(f"{n} parts cannot be cut into {count} pieces")
    return [StageCut(*way.costs, way.cuts) for way in best[n]], exact  # type: ignore[call-arg, arg-type]


def _drop_dominated(ways: Iterable[_PartialCut]) -> tuple[list[_PartialCut], bool]:
    kept: list[_PartialCut] = []
    for way in sorted(ways, key=lambda w: (max(w.costs[0], *w.costs[2:], 0), w.costs, w.cuts[-1])):
        if not any(all(a <= b for a, b in zip(other.costs, way.costs, strict=True)) for other in kept):
            if len(kept) == MAX_KEPT:
                return kept, False
            kept.append(way)
    return kept, True
