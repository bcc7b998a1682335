"""Who sends what to whom, so that state which lies as one placement says comes to lie as another says.

Every element that a rank is to hold and does not hold is sent to it exactly once; a rank sends itself nothing, and to
nobody what is there already: fewer bytes there cannot be. Who sends is chosen so that the fullest sender sends little.

[Note: How even] What is missing is dealt out by groups of equal owners, those of the fewest owners first. A group's
owners come as near to one level as what they send already allows; what it has to send is laid end to end and cut
between them, so there are few cuts. Where two such groups share nobody, or one contains the other, as in what `whole`,
`sharded`, `layers`, `split`, `copied` and `dealt` make of disjoint groups of ranks, no choice has a fullest sender that
sends less, but for one element and one byte, by which cuts and levels are rounded. Else it is about what a greedy
choice element by element comes to, and nothing is promised.

All ranks make the same plan by themselves, from values that they share; nothing depends on the order of a mapping.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from workbench.host.placement.placement import Placement
from workbench.host.placement.slices import Slice, deal, refine

SHOWN = 3  # tensors that an error names; the others are counted

Wanted = tuple[int, str, Slice]  # (who needs it, name, elements)


class Transfer(NamedTuple):
    """These elements of one tensor go from one rank to another. They lie in one slice of either's placement."""

    source: int
    to: int
    name: str
    slice: Slice


@dataclass(frozen=True, eq=False)
class Plan:
    """What goes from whom to whom, in the order in which it travels: the widest elements first, by name and place."""

    between: Mapping[tuple[int, int], tuple[Transfer, ...]]  # by (source, receiver), pairs that have anything only
    nbytes: Mapping[tuple[int, int], int]

    @property
    def transfers(self) -> list[Transfer]:
        return [t for pair in sorted(self.between) for t in self.between[pair]]

    def sent(self, source: int) -> int:
        """Bytes that a rank sends."""
        return sum(n for (who, _), n in self.nbytes.items() if who == source)

    def lengths(self, group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Bytes from each rank of a group to each, as `all_to_allv` wants them.

        Raises ValueError where somebody who sends or receives is not in it.
        """
        return _lengths(self, group)


@lru_cache(maxsize=8)  # as `_plan`
def _lengths(todo: Plan, group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if outside := sorted({rank for pair in todo.between for rank in pair} - set(group)):
        raise ValueError(f"move: rank {outside[0]} is to send or receive and is not in the group of {list(group)}")
    return tuple(tuple(todo.nbytes.get((i, j), 0) for j in group) for i in group)


def plan(was: Placement, to: Placement, alive: Collection[int], widths: Mapping[str, int]) -> Plan:
    """What has to be sent.

    alive:  who still has what `was` says it holds; others may be in `to`, and need all of it
    widths: bytes of an element of each tensor in `to`

    Raises LookupError where nobody alive has an element: "blocks.3.qkv.weight: 4768 elements have no owner left"; and
    ValueError where a name stands for tensors of different size. On all ranks alike.
    """
    return _plan(was, to, tuple(sorted(alive)), tuple(sorted((name, widths[name]) for name in to.sizes)))


@lru_cache(maxsize=8)  # the ranks of a simulation all ask for the same plan
def _plan(was: Placement, to: Placement, alive: tuple[int, ...], each: tuple[tuple[str, int], ...]) -> Plan:
    widths = dict(each)
    between: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    sent = dict.fromkeys(alive, 0)
    wanted = _wanted(was, to, alive)
    for owners in sorted(wanted, key=lambda group: (len(group), group)):
        line = [(piece, widths[name], (rank, name)) for rank, name, piece in sorted(wanted[owners])]
        amount = sum(piece.numel * width for piece, width, _ in line)
        ends = list(accumulate(levelled([sent[owner] for owner in owners], amount)))
        for owner, hand in zip(owners, deal(line, ends), strict=True):
            for piece, (rank, name) in hand:
                between[owner, rank].append(Transfer(owner, rank, name, piece))
                sent[owner] += piece.numel * widths[name]
    ordered = {pair: tuple(sorted(found, key=lambda t: (-widths[t.name], t.name, t.slice)))
               for pair, found in between.items()}  # fmt: skip
    return Plan(ordered, {pair: sum(t.slice.numel * widths[t.name] for t in found) for pair, found in ordered.items()})


def levelled(loads: Sequence[int], amount: int) -> list[int]:
    """How `amount` is shared out so that the highest load is as low as can be, and the others as even as that leaves.

    >>> levelled([5, 0, 9], 7)  # to loads of 6, 6 and 9
    [1, 6, 0]
    """
    order = sorted(range(len(loads)), key=loads.__getitem__)
    filled = len(order)  # so many of the emptiest come to one level
    while (level := (amount + sum(loads[i] for i in order[:filled])) // filled) < loads[order[filled - 1]]:
        filled -= 1
    over = amount + sum(loads[i] for i in order[:filled]) - level * filled
    shares = [0] * len(loads)
    for place, i in enumerate(order[:filled]):
        shares[i] = level + (place < over) - loads[i]
    return shares


def _wanted(was: Placement, to: Placement, alive: tuple[int, ...]) -> dict[tuple[int, ...], list[Wanted]]:
    """What is missing where, by the ranks that have it."""
    found: dict[tuple[int, ...], list[Wanted]] = defaultdict(list)
    lost: dict[str, int] = {}
    known: dict[_Sets, list[_Missing]] = {}  # parameters and their moments mostly lie alike
    for name in sorted(to.sizes):
        if was.sizes.get(name, to.sizes[name]) != to.sizes[name]:
            raise ValueError(f"{name} has {was.sizes[name]} elements where it lies and {to.sizes[name]} where it is to "
                             f"lie; a name stands for one tensor")  # fmt: skip
        sets = _sets(name, was, to, alive)
        if sets not in known:
            known[sets] = list(_missing(sets))
        for piece, owners, needy in known[sets]:
            if owners:
                found[owners] += [(rank, name, piece) for rank in needy]
            else:
                lost[name] = lost.get(name, 0) + piece.numel
    if lost:
        raise LookupError(_lost(lost))
    return found


_Sets = tuple[tuple[tuple[Slice, ...], tuple[int, ...], tuple[int, ...]], ...]  # (slices, who has them, who is to)
_Missing = tuple[Slice, tuple[int, ...], tuple[int, ...]]  # (elements, who has them, who needs them)


def _sets(name: str, was: Placement, to: Placement, alive: tuple[int, ...]) -> _Sets:
    """The different sets of slices of one tensor; replicas count once."""
    has: dict[tuple[Slice, ...], tuple[list[int], list[int]]] = {}
    for rank in alive:
        if slices := was.at(rank).get(name):
            has.setdefault(slices, ([], []))[0].append(rank)
    for rank in to.ranks:
        if slices := to.at(rank).get(name):
            has.setdefault(slices, ([], []))[1].append(rank)
    return tuple((slices, tuple(before), tuple(after)) for slices, (before, after) in sorted(has.items()))


def _missing(sets: _Sets) -> Iterator[_Missing]:
    """The parts that somebody needs, each with all who have it and all who need it."""
    for piece, members in refine([slices for slices, _, _ in sets]):
        here = [sets[i][1:] for i in _ones(members)]
        owners = {rank for before, _ in here for rank in before}
        if needy := {rank for _, after in here for rank in after} - owners:
            yield piece, tuple(sorted(owners)), tuple(sorted(needy))


def _ones(bits: int) -> Iterator[int]:
    """Which bits are set, from the lowest: few of thousands."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _lost(lost: dict[str, int]) -> str:
    first = [f"{name}: {n} elements have no owner left" for name, n in list(lost.items())[:SHOWN]]
    more = len(lost) - len(first)
    return "; ".join(first) + (f"; and so have elements of {more} more tensors" if more else "")
