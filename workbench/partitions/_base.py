"""The whole contract of a partition, on one screen. No tensors, no ranks' states and no wires are known here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from workbench.partitions.schedules import Action
from workbench.settings import Family

if TYPE_CHECKING:
    from workbench.compressors import Coder
    from workbench.rank import Memory


class Coding(NamedTuple):
    """What crosses in place of activations and of their gradients; None: they cross as they are.

    masks: does a gradient go back only through what a codec has let of its activation cross?
    """

    there: Coder | None = None
    back: Coder | None = None
    masks: bool = False


PLAIN = Coding()


@dataclass(frozen=True, kw_only=True)
class Partition(Family):
    """How one replica of the model is spread over ranks, and in which order they compute its pieces.

    A strategy is what happens between replicas, a partition what happens inside one. What a strategy calls all ranks
    are those that hold the same piece, so its text knows nothing of partitions.
    """

    home: ClassVar[str] = "workbench.partitions"

    def dims(self) -> tuple[tuple[str, int], ...]:
        """The dimensions of the mesh that one replica takes, as (name, size), neighbours last; none: it is whole."""
        return ()

    @property
    def size(self) -> int:
        """How many ranks one replica takes."""
        return prod(size for _, size in self.dims())

    @property
    def depth(self) -> int:
        """Into how many stages a replica's layers are cut."""
        return dict(self.dims()).get("stage", 1)

    @property
    def pieces(self) -> int:
        """Into how many pieces a rank's stage is cut, which are not neighbours in the model."""
        return 1

    @property
    def cuts(self) -> tuple[int, ...]:
        """At which parts of the model its pieces begin, the first one left out; none: where they are alike."""
        return ()

    @property
    def slices(self) -> int:
        """Over how many ranks each matrix is dealt out, which compute it together."""
        return 1

    @property
    def sequences(self) -> bool:
        """Does each of them have its own positions of what lies between two layers?"""
        return False

    @property
    def micro_batches(self) -> int:
        """Into how many parts a batch is cut, whose gradients add up."""
        return 1

    def actions(self, stage: int) -> list[Action]:
        """What the ranks of a stage compute of one batch, in order; nothing where a replica is whole."""
        return []

    def ahead(self, stage: int) -> int:
        """How many forwards of batches to come they have made when a step begins."""
        return 0

    @property
    def delayed(self) -> bool:
        """Does a whole batch read the weights that were the newest as the step before its own began?"""
        return False

    @property
    def layers(self) -> Partition:
        """How the ranks of one stage compute its layers."""
        return self

    @property
    def recompute(self) -> tuple[str, int]:
        """What backward computes again instead of keeping it, and in each how-manieth unit of the model."""
        return "none", 1

    def between(self, memory: Memory) -> Coding:
        """What crosses between stages."""
        return PLAIN

    def inside(self, memory: Memory) -> Coding:
        """What crosses between the ranks of a stage, which compute its layers together."""
        return PLAIN

    def fewer(self) -> Iterator[Partition]:
        """The same over fewer ranks, that over the most first; for a run that has lost some."""
        yield from ()

    def refuses(self, batch: int) -> str | None:
        """Why a batch of so many examples (0: not known) cannot be, in a sentence that says what would do; or None."""
        return None
