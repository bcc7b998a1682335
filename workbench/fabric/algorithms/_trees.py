"""Two binary trees over the same ranks, and the rounds of messages along them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

Tree = tuple[int | None, ...]  # each rank's parent; the root has none


class Hop(NamedTuple):
    """A message of a round: piece `piece` of a tree's half, up (to add) or down (to copy)."""

    source: int
    to: int
    tree: int
    piece: int
    up: bool


@lru_cache(maxsize=256)
def trees(size: int) -> tuple[Tree, Tree]:
    """Returns 2 trees. Inner ranks of one are leaves of the other as far as possible.

    In the first, odd ranks are leaves. Rank 0 is the root with 1 child. The second is its mirror image. With an odd
    number of ranks it is the first, shifted by 1 rank.
    """
    first = tuple(_parent(i, size) for i in range(size))
    there = [size - 1 - i if size % 2 == 0 else (i - 1) % size for i in range(size)]
    here = {at: i for i, at in enumerate(there)}
    above = [first[at] for at in there]
    return first, tuple(None if at is None else here[at] for at in above)


def _parent(i: int, size: int) -> int | None:
    bit = i & -i
    above = (i ^ bit) | (bit << 1)
    return None if not i else above if above < size else i ^ bit


@lru_cache(maxsize=256)
def rounds(size: int, pieces: int) -> tuple[tuple[Hop, ...], ...]:
    """Returns the messages of each round, in which a rank sends and receives at most 1.

    Early pieces come first. On the way up, pieces farther from the root come first.
    """
    both, found = trees(size), []
    waits = [[[tree.count(i)] * pieces for i in range(size)] for tree in both]  # children that have not sent yet
    has = [[[False] * pieces for _ in range(size)] for _ in both]
    # for each edge and direction the next piece: pieces keep their order
    todo = [(0, not up, -deep if up else deep, Hop(*((i, p) if up else (p, i)), t, 0, up))
            for t, tree in enumerate(both) for i, p in enumerate(tree) if p is not None
            for deep in [_depth(tree, i)] for up in (True, False)]  # fmt: skip
    while todo:
        busy: set[tuple[str, int]] = set()
        now: list[Hop] = []
        later = []
        for piece, down, depth, hop in sorted(todo):
            root = both[hop.tree][hop.source] is None
            whole = waits[hop.tree][hop.source][hop.piece] == 0
            ready = whole if hop.up or root else has[hop.tree][hop.source][hop.piece]
            ends = {("out", hop.source), ("in", hop.to)}
            if not ready or ends & busy:
                later.append((piece, down, depth, hop))
                continue
            now.append(hop)
            busy |= ends
            if piece + 1 < pieces:
                later.append((piece + 1, down, depth, hop._replace(piece=piece + 1)))
        for hop in now:
            if hop.up:
                waits[hop.tree][hop.to][hop.piece] -= 1
            else:
                has[hop.tree][hop.to][hop.piece] = True
        found.append(tuple(now))
        todo = later
    return tuple(found)


def _depth(tree: Tree, i: int) -> int:
    above = tree[i]
    return 0 if above is None else 1 + _depth(tree, above)
