"""A mesh: ranks in a grid of named dimensions, and the groups along these dimensions.

The layout is that of torch's DeviceMesh: ranks of the last dimension are neighbours. Serving ranks are outside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

from workbench.rank.errors import StrategyError


@dataclass(frozen=True)
class Group:
    """Some ranks of a run, in order.

    dims:       the mesh's dimensions in which they differ
    ranks:      their numbers in the run
    generation: of the ranks and their mesh. A group of an earlier one is invalid
    parallel:   the number of groups of these dimensions. They may communicate at the same time
    """

    dims: tuple[str, ...]
    ranks: tuple[int, ...]
    generation: int = 0
    parallel: int = field(default=1, compare=False)

    def __len__(self) -> int:
        return len(self.ranks)

    def __hash__(self) -> int:  # cached for lanes of thousands of ranks
        return self._hash

    def __str__(self) -> str:
        return self._name

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.ranks, self.generation))

    @cached_property
    def _name(self) -> str:
        return f"{'+'.join(self.dims)} [{_listed(self.ranks)}]"

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def index(self, rank: int) -> int:
        """Returns the index in the group of rank `rank` of the run."""
        if rank not in self._places:
            raise StrategyError(f"rank {rank} is not in group {self}")
        return self._places[rank]


@dataclass(frozen=True)
class Mesh:
    """Named dimensions and their sizes, outermost first. `ranks` fill it in order.

    inside: the dimensions of one replica of the model. Along the other dimensions ranks hold the same part

    >>> Mesh((("between", 2), ("within", 2)), (0, 1, 2, 3)).group(("within",), 2).ranks
    (2, 3)
    """

    dims: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    generation: int = 0
    inside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dims]
        if not names or (twice := [name for name in names if names.count(name) > 1]):
            what = f"; {twice[0]!r} occurs twice" if names else ""
            what += ", once in the partition: rename yours" if names and twice[0] in self.inside else ""
            raise StrategyError(f"mesh {self}: each dimension needs a name of its own{what}")
        if prod(size for _, size in self.dims) != len(self.ranks):
            raise StrategyError(
                f"mesh {self}: makes {prod(size for _, size in self.dims)} ranks, but {len(self.ranks)} train; let the "
                f"sizes of its dimensions multiply to {len(self.ranks)}"
            )

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.dims)

    @classmethod
    def line(cls, size: int) -> Mesh:
        """Returns a mesh of replicas only: one dimension, "data"."""
        return cls((("data", size),), tuple(range(size)))

    @property
    def flat(self) -> bool:
        """Whether at most one dimension has more than 1 rank."""
        return sum(size > 1 for _, size in self.dims) < 2

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns the index of rank `rank` of the run in each dimension."""
        if rank not in self._places:
            raise StrategyError(f"rank {rank} is a server: it is not part of the mesh {self} and has no group in it")
        place, found = self._places[rank], {}
        for name, size in reversed(self.dims):
            place, found[name] = divmod(place, size)
        return {name: found[name] for name, _ in self.dims}

    def group(self, dims: tuple[str, ...], rank: int) -> Group:
        """Returns the group of ranks that differ from `rank` only in `dims`."""
        sizes = dict(self.dims)
        if not dims or (unknown := [name for name in dims if name not in sizes]):
            asked = ", ".join(map(repr, unknown)) if dims else ""
            raise StrategyError(f"group({asked}): the mesh is {self}; name one or more of its dimensions")
        here = self.coordinate(rank)
        ways = [range(size) if name in dims else (here[name],) for name, size in self.dims]
        ranks = tuple(self.ranks[self._place(where)] for where in product(*ways))
        named = tuple(name for name, _ in self.dims if name in dims)
        return Group(named, ranks, self.generation, len(self.ranks) // len(ranks))

    def _place(self, where: tuple[int, ...]) -> int:
        place = 0
        for (_, size), index in zip(self.dims, where, strict=True):
            place = place * size + index
        return place

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}


def _listed(ranks: tuple[int, ...], most: int = 8) -> str:
    """Lists up to `most` ranks, or the first two and the last of more ranks."""
    if len(ranks) <= most:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
