"""Plans which rank sends which elements to which, to get from one placement to another.

Each rank receives every missing element exactly once, so the number of bytes is minimal. All ranks make the same plan:
no result depends on the order of a mapping.

[Note: How even] The plan assigns missing elements by groups of equal owners, the smallest groups first. It levels the
loads of a group's owners and cuts their elements, end to end, between them. So cuts are few. If any two groups are
disjoint or nested, the fullest sender's load is optimal, up to one element and one byte of rounding. The methods of
Placement make such groups from disjoint groups of ranks. Otherwise the load is near that of a greedy choice by element,
without a guarantee.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from workbench.host.placement.placement import Placement
from workbench.host.placement.strided_slices import StridedSlice, cut_slices, refine_slices

MAX_SHOWN = 3  # tensors per error

Wanted = tuple[int, str, StridedSlice]  # (rank that needs it, name, elements)


class Transfer(NamedTuple):
    """Elements for another rank, inside a single slice of either placement."""

    source: int
    to: int
    name: str
    slice: StridedSlice


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """All transfers in the order of sending: the widest elements first, then by name and place."""

    between: Mapping[tuple[int, int], tuple[Transfer, ...]]  # by (source, receiver)
    nbytes: Mapping[tuple[int, int], int]

    @property
    def all_transfers(self) -> list[Transfer]:
        return [t for pair in sorted(self.between) for t in self.between[pair]]

    def count_sent_bytes(self, source: int) -> int:
        return sum(n for (who, _), n in self.nbytes.items() if who == source)

    def list_lengths(self, group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the bytes from each rank of a group to each, as `all_to_allv` needs them.

        Raises ValueError if a sender or receiver is not in the group.
        """
        return _list_lengths(self, group)


@lru_cache(maxsize=8)
def _list_lengths(todo: TransferPlan, group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if outside := sorted({rank for pair in todo.between for rank in pair} - set(group)):
        raise ValueError(f"move: rank {outside[0]} must send or receive, but is not in the group of {list(group)}")
    return tuple(tuple(todo.nbytes.get((i, j), 0) for j in group) for i in group)


def plan_transfers(was: Placement, to: Placement, alive: Collection[int], widths: Mapping[str, int]) -> TransferPlan:
    """Plans the transfers from `was` to `to`.

    Errors are the same on all ranks. Raises LookupError if no living rank has an element. Raises ValueError if a
    name stands for tensors of different sizes.

    alive:  the ranks that still hold their part of `was`; any other rank in `to` needs its whole part
    widths: bytes per element of each tensor in `to`
    """
    return _plan_transfers(was, to, tuple(sorted(alive)), tuple(sorted((name, widths[name]) for name in to.sizes)))


@lru_cache(maxsize=8)  # simulated ranks need the same plan
def _plan_transfers(
    was: Placement, to: Placement, alive: tuple[int, ...], each: tuple[tuple[str, int], ...]
) -> TransferPlan:
    widths = dict(each)
    between: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    sent = dict.fromkeys(alive, 0)
    wanted = _find_wanted(was, to, alive)
    for owners in sorted(wanted, key=lambda group: (len(group), group)):
        line = [(piece, widths[name], (rank, name)) for rank, name, piece in sorted(wanted[owners])]
        amount = sum(piece.element_count * width for piece, width, _ in line)
        ends = list(accumulate(level_loads([sent[owner] for owner in owners], amount)))
        for owner, hand in zip(owners, cut_slices(line, ends), strict=True):
            for piece, (rank, name) in hand:
                between[owner, rank].append(Transfer(owner, rank, name, piece))
                sent[owner] += piece.element_count * widths[name]
    ordered = {pair: tuple(sorted(found, key=lambda t: (-widths[t.name], t.name, t.slice)))
               for pair, found in between.items()}  # fmt: skip
    return TransferPlan(
        ordered, {pair: sum(t.slice.element_count * widths[t.name] for t in found) for pair, found in ordered.items()}
    )


def level_loads(loads: Sequence[int], amount: int) -> list[int]:
    """Shares out `amount` so that the loads are most even.

    >>> level_loads([5, 0, 9], 7)  # to loads of 6, 6 and 9
    [1, 6, 0]
    """
    order = sorted(range(len(loads)), key=loads.__getitem__)
    filled = len(order)  # the lowest loads
    while (level := (amount + sum(loads[i] for i in order[:filled])) // filled) < loads[order[filled - 1]]:
        filled -= 1
    over = amount + sum(loads[i] for i in order[:filled]) - level * filled
    shares = [0] * len(loads)
    for place, i in enumerate(order[:filled]):
        shares[i] = level + (place < over) - loads[i]
    return shares


def _find_wanted(was: Placement, to: Placement, alive: tuple[int, ...]) -> dict[tuple[int, ...], list[Wanted]]:
    found: dict[tuple[int, ...], list[Wanted]] = defaultdict(list)
    lost: dict[str, int] = {}
    known: dict[_Sets, list[_Missing]] = {}  # parameters and their moments mostly have the same slices
    for name in sorted(to.sizes):
        if was.sizes.get(name, to.sizes[name]) != to.sizes[name]:
            raise ValueError(f"{name} has {was.sizes[name]} elements before the move and {to.sizes[name]} after it; "
            f"a name must stand for one tensor")  # fmt: skip
        sets = _find_slice_sets(name, was, to, alive)
        if sets not in known:
            known[sets] = list(_find_missing(sets))
        for piece, owners, needy in known[sets]:
            if owners:
                found[owners] += [(rank, name, piece) for rank in needy]
            else:
                lost[name] = lost.get(name, 0) + piece.element_count
    if lost:
        raise LookupError(_describe_lost(lost))
    return found


_Sets = tuple[
    tuple[tuple[StridedSlice, ...], tuple[int, ...], tuple[int, ...]], ...
]  # (slices, ranks before, ranks after)
_Missing = tuple[StridedSlice, tuple[int, ...], tuple[int, ...]]  # (elements, owners, ranks that need them)


def _find_slice_sets(name: str, was: Placement, to: Placement, alive: tuple[int, ...]) -> _Sets:
    """Replicas count once."""
    has: dict[tuple[StridedSlice, ...], tuple[list[int], list[int]]] = {}
    for rank in alive:
        if slices := was.slices_of_rank(rank).get(name):
            has.setdefault(slices, ([], []))[0].append(rank)
    for rank in to.holding_ranks:
        if slices := to.slices_of_rank(rank).get(name):
            has.setdefault(slices, ([], []))[1].append(rank)
    return tuple((slices, tuple(before), tuple(after)) for slices, (before, after) in sorted(has.items()))


def _find_missing(sets: _Sets) -> Iterator[_Missing]:
    for piece, members in refine_slices([slices for slices, _, _ in sets]):
        here = [sets[i][1:] for i in _list_set_bits(members)]
        owners = {rank for before, _ in here for rank in before}
        if needy := {rank for _, after in here for rank in after} - owners:
            yield piece, tuple(sorted(owners)), tuple(sorted(needy))


def _list_set_bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _describe_lost(lost: dict[str, int]) -> str:
    first = [f"{name}: {n} elements have no owner left" for name, n in list(lost.items())[:MAX_SHOWN]]
    more = len(lost) - len(first)
    return "; ".join(first) + (f"; and so have elements of {more} more tensors" if more else "")
