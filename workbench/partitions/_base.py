"""The interface of a partition. It knows no tensors, no state of ranks and no process groups."""

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
    """Encodings of activations and of their gradients between ranks; None: sent unchanged.

    masks: whether a gradient goes back only through the entries of its activation that the codec sent
    """

    there: Coder | None = None
    back: Coder | None = None
    masks: bool = False


PLAIN = Coding()


@dataclass(frozen=True, kw_only=True)
class Partition(Family):
    """How one replica of the model is spread over ranks, and in which order they compute.

    A strategy acts between replicas, a partition inside one. A strategy sees only the ranks that hold the same piece,
    so its code knows nothing of partitions.

    stage:   a stage's number, from 0
    memory:  the compressor's Memory on this rank
    batch:   the experiment's `batch`, in examples per rank. 0: unknown
    """

    home: ClassVar[str] = "workbench.partitions"

    def dims(self) -> tuple[tuple[str, int], ...]:
        """Returns the mesh dimensions of one replica as `(name, size)`. Neighbours come last. () if it is whole."""
        return ()

    @property
    def size(self) -> int:
        """The number of ranks of one replica."""
        return prod(size for _, size in self.dims())

    @property
    def depth(self) -> int:
        """The number of stages that a replica's layers are cut into."""
        return dict(self.dims()).get("stage", 1)

    @property
    def pieces(self) -> int:
        """The number of pieces of a rank's stage. They are not neighbours in the model."""
        return 1

    @property
    def cuts(self) -> tuple[int, ...]:
        """The parts of the model at which the pieces after the first begin. (): cut evenly."""
        return ()

    @property
    def slices(self) -> int:
        """The number of ranks that share each matrix and compute it together."""
        return 1

    @property
    def sequences(self) -> bool:
        """Whether each rank that shares matrices has only its own positions between two layers."""
        return False

    @property
    def micro_batches(self) -> int:
        """The number of parts of a batch; their gradients add up."""
        return 1

    def actions(self, stage: int) -> list[Action]:
        """Returns the passes of a stage's ranks for one batch in order. [] if a replica is whole."""
        return []

    def ahead(self, stage: int) -> int:
        """Returns how many forwards of later batches a stage has made when a step begins."""
        return 0

    @property
    def delayed(self) -> bool:
        """Whether a whole batch uses the weights that were newest when the step before its own began."""
        return False

    @property
    def layers(self) -> Partition:
        """How the ranks of one stage compute its layers."""
        return self

    @property
    def recompute(self) -> tuple[str, int]:
        """The part that backward recomputes, and n: it does so in every n-th unit of the model.

        The part is "none", "units" or "attention".
        """
        return "none", 1

    def between(self, memory: Memory) -> Coding:
        """Returns the encoding between stages."""
        return PLAIN

    def inside(self, memory: Memory) -> Coding:
        """Returns the encoding between the ranks of a stage, which compute its layers together."""
        return PLAIN

    def fewer(self) -> Iterator[Partition]:
        """Yields the same partition over fewer ranks, largest first. A run that has lost ranks uses it."""
        yield from ()

    def refuses(self, batch: int) -> str | None:
        """Returns why it cannot take a batch of this size, with a remedy; or None."""
        return None
