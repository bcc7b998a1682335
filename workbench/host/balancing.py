"""Where a row of parts is cut so that the slowest piece is as fast as can be. No model and no clock is known here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

NEVER = float("inf")


def balanced(times: Sequence[Sequence[float]], count: int, together: Collection[int] = (),
             barren: Collection[int] = ()) -> tuple[int, ...]:  # fmt: skip
    """The parts at which pieces 1 to `count` - 1 begin: of all cuts one whose slowest piece is the fastest.

    times:    what each part takes, in any unit; one row for each piece, where who computes it matters, and round again
    together: parts that must be in one piece with the part before them
    barren:   parts that must not be alone in a piece, nor with others of these only

    What is best for the first k pieces and the first n parts follows from what is best for k - 1 pieces: n^2 `count`
    sums for n parts. Of cuts that are as good the one is taken whose last piece begins first.
    Raises ValueError where no cut is allowed.

    Reference: for stages on one rank each it is the optimizer of Narayanan et al., "PipeDream: Generalized Pipeline
    Parallelism for DNN Training", SOSP 2019, https://doi.org/10.1145/3341301.3359646

    >>> balanced([[1, 1, 1, 1, 4]], 2), balanced([[3, 3, 3, 3], [1, 1, 1, 1]], 2)
    ((4,), (1,))
    """
    n = len(times[0])
    sums = [[0.0, *accumulate(row)] for row in times]
    bears = [0, *accumulate(part not in barren for part in range(n))]
    begins = [at for at in range(1, n) if at not in together]

    def takes(piece: int, begin: int, end: int) -> float:
        row = sums[piece % len(sums)]
        return row[end] - row[begin] if bears[end] > bears[begin] else NEVER

    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (takes(0, 0, end), ()) for end in range(1, n + 1)}
    for piece in range(1, count):
        found = {}
        for end in range(piece + 1, n + 1):
            ways = [(max(best[at][0], takes(piece, at, end)), at) for at in begins if at < end and at in best]
            if ways:
                slowest, at = min(ways)
                found[end] = slowest, (*best[at][1], at)
        best = found
    if n not in best or best[n][0] == NEVER:
        raise ValueError(f"{n} parts cannot be cut into {count} pieces")
    return best[n][1]
