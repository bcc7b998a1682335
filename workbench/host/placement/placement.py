"""Which rank holds which elements of every named tensor, parameters and optimizer state alike.

Replicas hold every element. ZeRO slices over the data dimension. A pipeline puts layers on stages. Tensor parallelism
slices matrices. Tensors that are not elementwise (buffers, counters, generators' state) are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from workbench.host.placement.strided_slices import StridedSlice, cut_slices, refine_slices

Held = Mapping[str, tuple[StridedSlice, ...]]  # by tensor name


@dataclass(frozen=True)
class Placement:
    """Which elements each rank holds. Do not write to the mappings.

    sizes: number of elements of each tensor, in order of use
    held:  by rank (its number in the run) and name, its slices

    A rank's tensor is flat, (n,), with the elements of its slices in order. Raises ValueError if an element is on no
    rank, twice on a rank, or not in the tensor.

    >>> both = Placement.place_layers({"a": 6, "b": 4}, [0, 1], [["a"], ["b"]]).copy_to_groups({0: [0, 2], 1: [1, 3]})
    >>> [both.count_elements(rank) for rank in both.holding_ranks]  # a pipeline of two stages in two replicas
    [6, 4, 6, 4]
    """

    sizes: Mapping[str, int]
    held: Mapping[int, Held]

    def __post_init__(self) -> None:
        held = {
            rank: {name: tuple(s.to_normal_form() for s in slices if s.element_count) for name, slices in here.items()}
            for rank, here in sorted(self.held.items())
        }
        held = {rank: {name: slices for name, slices in here.items() if slices} for rank, here in held.items()}
        object.__setattr__(self, "sizes", dict(self.sizes))
        object.__setattr__(self, "held", {rank: here for rank, here in held.items() if here})
        self._require_valid()

    # -- simple placements --

    @classmethod
    def place_whole(cls, sizes: Mapping[str, int], ranks: Collection[int]) -> Placement:
        return cls(sizes, {rank: {name: (StridedSlice(0, n),) for name, n in sizes.items()} for rank in ranks})

    @classmethod
    def sharded(cls, sizes: Mapping[str, int], ranks: Sequence[int], shares: Sequence[int] = ()) -> Placement:
        """Cuts all tensors, end to end, into one piece per rank; see `shard_to_groups`."""
        return cls.place_whole(sizes, ranks[:1]).shard_to_groups(dict.fromkeys(ranks[:1], ranks), shares)

    @classmethod
    def place_layers(
        cls, sizes: Mapping[str, int], ranks: Sequence[int], parts: Sequence[Collection[str]]
    ) -> Placement:
        """Places the i-th part, a collection of names, on the i-th rank. Ranks repeat if there are more parts.

        A tied tensor may be in several parts.
        """
        held: dict[int, dict[str, tuple[StridedSlice, ...]]] = {rank: {} for rank in ranks}
        for number, part in enumerate(parts):
            held[ranks[number % len(ranks)]].update({name: (StridedSlice(0, sizes[name]),) for name in part})
        return cls(sizes, held)

    @classmethod
    def place_slices(cls, shapes: Mapping[str, Sequence[int]], ranks: Sequence[int], dim: int) -> Placement:
        """Cuts each tensor, viewed in the given shape, along dimension `dim` as evenly as possible.

        Of torch's weight (out, in), Megatron's column-parallel layer is dim 0, its row-parallel layer dim 1. A fused
        qkv is dim 1 of (3, heads, d * in).
        """
        held: dict[int, dict[str, tuple[StridedSlice, ...]]] = {rank: {} for rank in ranks}
        for name, shape in shapes.items():
            at = range(len(shape))[dim]
            n, inner, times = shape[at], prod(shape[at + 1 :]), prod(shape[:at])
            for k, rank in enumerate(ranks):
                low, high = n * k // len(ranks), n * (k + 1) // len(ranks)
                held[rank][name] = (StridedSlice(low * inner, (high - low) * inner, n * inner, times),)
        return cls({name: prod(shape) for name, shape in shapes.items()}, held)

    # -- combined placements --

    def copy_to_groups(self, groups: Mapping[int, Collection[int]]) -> Placement:
        """Gives the elements of rank r to each rank of groups[r]. Ranks without a group keep theirs."""
        return self._divide_elements(groups, lambda here, count: [here] * count)

    def shard_to_groups(self, groups: Mapping[int, Sequence[int]], shares: Sequence[int] = ()) -> Placement:
        """Cuts the elements of rank r among groups[r], in order of use, one contiguous piece each.

        Pieces have ceil(n / ranks) elements, the last ones fewer, as `Bucket.shard` and all-gathers need them. With
        `shares`, one number per rank of a group, pieces have that proportion, exact to one element.
        """
        return self._divide_elements(groups, lambda here, count: self._cut_elements(here, count, shares))

    def __or__(self, other: Placement) -> Placement:
        """Joins placements of different tensors, or of the same tensors on different ranks."""
        for name in self.sizes.keys() & other.sizes.keys():
            if self.sizes[name] != other.sizes[name]:
                raise ValueError(f"placement: {name} has {self.sizes[name]} elements in one and {other.sizes[name]} in "
                                 f"the other; a name stands for one tensor")  # fmt: skip
        held = {rank: dict(here) for rank, here in self.held.items()}
        for rank, here in other.held.items():
            _add_slices(held.setdefault(rank, {}), here)
        return Placement({**self.sizes, **other.sizes}, held)

    def select_names(self, names: Collection[str]) -> Placement:
        held = {rank: {name: slices for name, slices in here.items() if name in names}
                for rank, here in self.held.items()}  # fmt: skip
        return Placement({name: n for name, n in self.sizes.items() if name in names}, held)

    # -- queries --

    @property
    def holding_ranks(self) -> list[int]:
        return list(self.held)

    def slices_of_rank(self, rank: int) -> Held:
        """Returns the slices by name; empty for an unknown rank."""
        return self.held.get(rank, {})

    def count_elements(self, rank: int, name: str | None = None) -> int:
        here = self.slices_of_rank(rank)
        return sum(s.element_count for each in ([name] if name is not None else here) for s in here.get(each, ()))

    def __hash__(self) -> int:
        return hash((len(self.sizes), sum(self.sizes.values()), *self.held))

    # -- internals --

    def _divide_elements(self, groups: Mapping[int, Collection[int]],
                give: Callable[[Held, int], Sequence[Held]]) -> Placement:  # fmt: skip
        held = {rank: dict(here) for rank, here in self.held.items() if rank not in groups}
        for rank, ranks in groups.items():
            for other, here in zip(ranks, give(self.slices_of_rank(rank), len(ranks)), strict=True):
                _add_slices(held.setdefault(other, {}), here)
        return Placement(self.sizes, held)

    def _cut_elements(self, here: Held, count: int, shares: Sequence[int]) -> list[Held]:
        line = [(s, 1, name) for name in self.sizes for s in here.get(name, ())]
        total = sum(s.element_count for s, _, _ in line)
        if shares and len(shares) != count:
            raise ValueError(f"placement: {len(shares)} shares for {count} ranks; give one number for each")
        chunk, every = -(-total // count), sum(shares)
        ends = [total * share // every for share in accumulate(shares)] if shares else [
            min(total, chunk * (k + 1)) for k in range(count)]  # fmt: skip
        pieces: list[dict[str, tuple[StridedSlice, ...]]] = [{} for _ in range(count)]
        for piece, hand in zip(pieces, cut_slices(line, ends), strict=True):
            for s, name in hand:
                piece[name] = (*piece.get(name, ()), s)
        return list(pieces)

    def _require_valid(self) -> None:
        sets: dict[str, dict[tuple[StridedSlice, ...], int]] = {name: {} for name in self.sizes}
        for rank, here in self.held.items():
            for name, slices in here.items():
                if name not in sets:
                    raise ValueError(f"placement: rank {rank} holds {name!r}, which has no size; add it to `sizes`")
                sets[name].setdefault(slices, rank)
        for name, each in sets.items():
            for slices, rank in each.items():
                _check_slices(f"placement: rank {rank} holds", name, self.sizes[name], slices)
            known = (
                self.sizes[name]
                if (StridedSlice(0, self.sizes[name]),) in each
                else _count_elements(refine_slices(list(each)))
            )
            if known < self.sizes[name]:
                raise ValueError(f"placement: {name}: {self.sizes[name] - known} elements have no rank; give them to "
                f"one, or remove the tensor from `sizes`")  # fmt: skip


def _add_slices(held: dict[str, tuple[StridedSlice, ...]], more: Held) -> None:
    for name, slices in more.items():
        mine = held.get(name, ())
        held[name] = mine + tuple(s for s in slices if s not in mine)


def _check_slices(who: str, name: str, size: int, slices: tuple[StridedSlice, ...]) -> None:
    """Raises ValueError unless slices are inside the tensor, fit their stride, and are disjoint."""
    for s in slices:
        if s.start < 0 or s.stop_element > size:
            raise ValueError(f"{who} elements {s.start} to {s.stop_element} of {name}, which has {size}")
        if s.times > 1 and s.length > s.stride:
            raise ValueError(f"{who} {s} of {name}: a stretch is longer than the stride; take a stride of {s.length}")
    twice = (
        sum(s.element_count for s in slices) - _count_elements(refine_slices([[s] for s in slices]))
        if len(slices) > 1
        else 0
    )
    if twice:
        raise ValueError(f"{who} {twice} elements of {name} twice; its slices must not overlap")


def _count_elements(parts: list[tuple[StridedSlice, int]]) -> int:
    return sum(s.element_count for s, _ in parts)
