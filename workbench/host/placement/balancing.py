"""Where a row of parts is cut so that the slowest stage is as fast as can be. No model and no clock is known here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

NEVER = float("inf")
KEPT = 50  # ways to cut the first parts that are kept, of stages with several pieces

Numbers = tuple[float, ...]


class Way(NamedTuple):
    """A way to cut: what the slowest stage takes, what crosses between pieces, and the parts at which these begin."""

    slowest: float
    crosses: float
    cuts: tuple[int, ...]


class _Begun(NamedTuple):
    """A way to cut the first parts.

    costs: the slowest of the stages that have all their pieces, what crosses, and what each other stage takes so far
    """

    costs: Numbers
    cuts: tuple[int, ...]


def balanced(times: Sequence[Sequence[float]], count: int, together: Collection[int] = (),
             barren: Collection[int] = ()) -> tuple[int, ...]:  # fmt: skip
    """The parts at which pieces 1 to `count` - 1 begin: of all cuts one whose slowest piece is fastest; see `front`.

    >>> balanced([[1, 1, 1, 1, 4]], 2), balanced([[3, 3, 3, 3], [1, 1, 1, 1]], 2)
    ((4,), (1,))
    """
    return front(times, count, together, barren)[0][0].cuts


def front(times: Sequence[Sequence[float]], count: int, together: Collection[int] = (), barren: Collection[int] = (),
          stages: int = 0, crossing: Sequence[Sequence[float]] = ((),)) -> tuple[list[Way], bool]:  # fmt: skip
    """Ways to cut of which no other has both a faster slowest stage and less that crosses, the fastest one first.

    times:    what each part takes, in any unit; one row for each piece, where who computes it matters, and round again
    together: parts that must be in one piece with the part before them
    barren:   parts that must not be alone in a piece, nor with others of these only
    stages:   piece k is on stage k modulo these; 0: each is a stage of its own
    crossing: what it costs that a piece begins at each part, in any unit; rows as those of `times`; empty: nothing

    What is best for the first k pieces and the first n parts follows from what is best for k - 1 pieces. A way to cut
    these is given up once another one is as good in all that still counts: the slowest stage that is complete, what
    crosses, and what each stage has that is to get more pieces. So all cuts are weighed. Only of stages with several
    pieces can so many ways be left that no more than KEPT are gone on with, those whose slowest stage is fastest so
    far; the second answer is whether none was lost. Of ways that are as good that one is taken whose last piece begins
    first. Raises ValueError where no cut is allowed.

    Reference: for stages of one piece on one rank each, and nothing that crosses, it is the optimizer of Narayanan et
    al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
    https://doi.org/10.1145/3341301.3359646

    >>> front([[1, 1, 1, 1]], 2, crossing=[[0, 1, 9, 8]])[0]
    [Way(slowest=2.0, crosses=9, cuts=(2,)), Way(slowest=3, crosses=1, cuts=(1,))]
    """
    n, stages = len(times[0]), stages or count
    sums = [[0.0, *accumulate(row)] for row in times]
    bears = [0, *accumulate(part not in barren for part in range(n))]
    begins = [at for at in range(1, n) if at not in together]
    exact = True

    def further(begun: Iterable[_Begun], piece: int, begin: int, end: int) -> Iterator[_Begun]:
        """The same with one more piece."""
        if bears[end] == bears[begin]:
            return
        row, paid = sums[piece % len(sums)], crossing[piece % len(crossing)]
        took, crosses = row[end] - row[begin], paid[begin] if piece and paid else 0
        for (slowest, crossed, *open_), cuts in begun:
            ahead = list(open_) if piece >= stages else [*open_, 0]
            mine = ahead.pop(0 if piece >= stages else -1) + took
            more = [mine] if piece + stages < count else []
            costs = (slowest if more else max(slowest, mine), crossed + crosses, *ahead, *more)
            yield _Begun(costs, (*cuts, begin) if piece else ())

    best = {end: list(further([_Begun((0, 0), ())], 0, 0, end)) for end in range(1, n + 1)}
    for piece in range(1, count):
        found = {}
        for end in range(piece + 1, n + 1):
            ways = (way for at in begins if at < end and at in best for way in further(best[at], piece, at, end))
            found[end], whole = _undominated(ways)
            exact = exact and whole
        best = found
    if not best.get(n):
        raise ValueError(f"{n} parts cannot be cut into {count} pieces")
    return [Way(*way.costs, way.cuts) for way in best[n]], exact  # type: ignore[call-arg, arg-type]


def _undominated(ways: Iterable[_Begun]) -> tuple[list[_Begun], bool]:
    """Those of which none other costs as little in everything, at most KEPT; and whether that are all."""
    kept: list[_Begun] = []
    for way in sorted(ways, key=lambda w: (max(w.costs[0], *w.costs[2:], 0), w.costs, w.cuts[-1])):
        if not any(all(a <= b for a, b in zip(other.costs, way.costs, strict=True)) for other in kept):
            if len(kept) == KEPT:
                return kept, False
            kept.append(way)
    return kept, True
