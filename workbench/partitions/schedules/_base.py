"""The whole contract of a schedule: what each stage of a pipeline computes, in order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from workbench.settings import Family


class Action(NamedTuple):
    """A pass of one micro-batch through a stage: "F", its forward, or "B", its backward; or, in two halves, "I", the
    gradient of what went in, and "W", those of the parameters.

    chunk: through which of the pieces of the model that the stage has, in the order of the model
    """

    what: str
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.what}{self.micro}{chr(ord('a') + self.chunk - 1) if self.chunk else ''}"


def forwards(*micros: int, chunk: int = 0) -> list[Action]:
    """The forwards of these micro-batches, one after the other."""
    return [Action("F", micro, chunk) for micro in micros]


def backwards(*micros: int, chunk: int = 0) -> list[Action]:
    """The backwards of these micro-batches, one after the other."""
    return [Action("B", micro, chunk) for micro in micros]


@dataclass(frozen=True, kw_only=True)
class Schedule(Family):
    """In which order a stage computes. A pass begins once what it needs has come from the piece before or after.

    Every micro-batch goes once forward and then once backward through each piece, backwards (the halves of which are
    for parameters) in their order: so gradients add up alike.

    A step is one batch, there and back. Under a schedule that never flushes stages are ahead of it: of m micro-batches
    to a batch, number m is the first of the next one. Each backward uses the weights that its forward has read.
    """

    home: ClassVar[str] = "workbench.partitions.schedules"

    @property
    def halves(self) -> bool:
        """Is each backward made in two halves?"""
        return False

    @property
    def delayed(self) -> bool:
        """Does a whole batch read the weights that were the newest as the step before its own began?"""
        return False

    def ahead(self, stage: int, stages: int) -> int:
        """How many forwards of batches to come a stage has made when a step begins, and before the first one makes."""
        return 0

    @property
    def pieces(self) -> int:
        """How many pieces of the model each stage has: consecutive ones are on consecutive stages, round and round."""
        return 1

    def refuses(self, stages: int, micros: int) -> str | None:
        """Why it cannot order so many micro-batches, in a sentence that says what would do; or None."""
        return None

    @abstractmethod
    def actions(self, stage: int, stages: int, micros: int) -> list[Action]:
        """What stage number `stage` of `stages` computes of `micros` micro-batches, in order."""
