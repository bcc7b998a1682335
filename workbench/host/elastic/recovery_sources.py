"""Finds the parts of a run's state that a loss left, with steps and ranks.

If ranks hold pieces, one rank may be a step ahead of another. So each keeps its last boundaries. The remaining ranks go
back to the newest boundary at which they have every piece. If replicas drift apart, each complete replica goes back to
its own boundary. The ranks then take the mean of the replicas with the newest mean of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from workbench.experiment import Experiment
from workbench.experiment.mesh_rules import list_shard_groups

Key = TypeVar("Key", bound=Hashable)


class PieceMap(NamedTuple):
    """The number of pieces (ways), and each place's piece."""

    ways: int
    at: tuple[int, ...]


class PieceSources(NamedTuple):
    """Where all pieces are.

    step:    the step with which training goes on
    sources: groups of places, each with all pieces
    steps:   each place's boundary
    """

    step: int
    sources: tuple[tuple[int, ...], ...]
    steps: Mapping[int, int]


def has_parts(e: Experiment) -> bool:
    """Whether a rank holds only a part of the state."""
    return e.partition.size > 1 or bool(e.strategy.shards) or e.strategy.tables


def map_pieces(e: Experiment, size: int, remembers: bool) -> PieceMap:
    """Maps pieces to places. remembers: whether the optimizer has any state"""
    if (ways := e.partition.size) > 1:
        return PieceMap(ways, tuple(place % ways for place in range(size)))
    if e.strategy.tables:  # each server has its own rows; trainers read all
        return PieceMap(size, tuple(range(size)))
    if "parameters" in e.strategy.shards or (remembers and e.strategy.shards):
        groups = list_shard_groups(e.strategy, size)
        where = {place: index for group in groups for index, place in enumerate(group)}
        return PieceMap(len(groups[0]), tuple(where[place] for place in range(size)))
    return PieceMap(1, (0,) * size)


def count_copies(e: Experiment, size: int, remembers: bool) -> int:
    """Counts the rarest piece's ranks."""
    count, at = map_pieces(e, size, remembers)
    return min(at.count(piece) for piece in range(count))


def find_agreed_step(bound: Sequence[int]) -> int | None:
    """Returns the step before which all ranks last had equal parameters; None if unknown. bound: as in RankReport"""
    step, _, apart = bound
    return step - apart if apart >= 0 else None


def find_newest(at: Mapping[Key, int | None]) -> set[Key]:
    """Returns the ranks or replicas with the newest mean of all ranks; all of them if one is unknown.

    at: `find_agreed_step` by rank or replica
    """
    known = [step for step in at.values() if step is not None]
    if len(known) < len(at):
        return set(at)
    return {one for one, step in at.items() if step == max(known)}


def find_sources(
    e: Experiment, size: int, remembers: bool, there: Mapping[int, Mapping[int, int | None]]
) -> PieceSources | None:
    """Returns the sources at the newest step with all pieces; None without any.

    there: for each remaining place, its boundaries after the same changes: `find_agreed_step` by step
    """
    count, at = map_pieces(e, size, remembers)
    if e.strategy.periodic:
        return _find_replica_sources(count, at, there)
    for step in sorted({step for steps in there.values() for step in steps}, reverse=True):
        holders = tuple(sorted(place for place, steps in there.items() if step in steps))
        if {at[place] for place in holders} == set(range(count)):
            return PieceSources(step, (holders,), dict.fromkeys(holders, step))
    return None


def _find_replica_sources(
    count: int, at: tuple[int, ...], there: Mapping[int, Mapping[int, int | None]]
) -> PieceSources | None:
    """Returns the complete replicas with the newest mean, else one made of parts."""
    sources, steps = [], dict[int, int]()
    for first in range(0, len(at), count):
        ranks = tuple(range(first, first + count))
        common = set.intersection(*(set(there.get(place, ())) for place in ranks))
        if common:
            sources.append(ranks)
            steps |= dict.fromkeys(ranks, max(common))
    if sources:
        counting = find_newest({ranks: there[ranks[0]][steps[ranks[0]]] for ranks in sources})
        sources = [ranks for ranks in sources if ranks in counting]
        steps = {place: steps[place] for ranks in sources for place in ranks}
    else:
        last = {place: max(each) for place, each in there.items() if each}
        best = [max((place for place in last if at[place] == piece), key=lambda p: (last[p], -p), default=None)
                for piece in range(count)]  # fmt: skip
        ranks = tuple(place for place in best if place is not None)
        if len(ranks) < count:
            return None
        sources, steps = [tuple(sorted(ranks))], {place: last[place] for place in ranks}
    return PieceSources(max(steps.values()), tuple(sources), steps)


def sort_by_need(found: PieceSources, at: tuple[int, ...], left: Collection[int]) -> list[int]:
    """Puts indispensable places first."""
    needed: list[int] = []
    if len(found.sources) > 1:
        needed = [place for group in found.sources for place in group]
    else:
        for place in _put_complete_first(found.sources[0], at):
            if at[place] not in {at[other] for other in needed}:
                needed.append(place)
    return [*needed, *(place for place in left if place not in needed)]


def _put_complete_first(places: tuple[int, ...], at: tuple[int, ...]) -> list[int]:
    ways = len(set(at))
    whole = [p for p in places if all(p - p % ways + k in places for k in range(ways))]
    return [*whole, *(p for p in places if p not in whole)]
