"""The interface of a schedule: the passes that each stage of a pipeline makes, in order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from workbench.settings import Family


class Action(NamedTuple):
    """A pass of one micro-batch through a stage: "F" is its forward, "B" its backward.

    A backward can have two halves: "I" is the gradient of the stage's input, "W" the gradient of its parameters.

    chunk: the piece of the stage that it passes, in the order of the model
    """

    what: str
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.what}{self.micro}{chr(ord('a') + self.chunk - 1) if self.chunk else ''}"


def forwards(*micros: int, chunk: int = 0) -> list[Action]:
    """Returns the forwards of these micro-batches, in order."""
    return [Action("F", micro, chunk) for micro in micros]


def backwards(*micros: int, chunk: int = 0) -> list[Action]:
    """Returns the backwards of these micro-batches, in order."""
    return [Action("B", micro, chunk) for micro in micros]


@dataclass(frozen=True, kw_only=True)
class Schedule(Family):
    """The order in which a stage computes.

    A pass begins when its input from a neighbouring piece has arrived. Every micro-batch passes each piece once forward
    and then once backward. Backwards, or their halves for parameters, keep the order of the micro-batches. So gradients
    always add up in the same order.

    A step is one batch, forward and backward. Under a schedule that never flushes, stages are ahead of the step. They
    count on: with m micro-batches to a batch, number m is the first of the next batch. Each backward uses the weights
    of its forward.

    stage:   a stage's number, from 0
    stages:  number of stages
    micros:  number of micro-batches to a batch
    """

    home: ClassVar[str] = "workbench.partitions.schedules"

    @property
    def halves(self) -> bool:
        """Whether each backward has two halves."""
        return False

    @property
    def delayed(self) -> bool:
        """Whether a whole batch uses the weights that were newest when the step before its own began."""
        return False

    def ahead(self, stage: int, stages: int) -> int:
        """Returns how many forwards of later batches a stage has made when any step begins."""
        return 0

    @property
    def pieces(self) -> int:
        """The number of pieces of the model on each stage. Consecutive pieces are on consecutive stages, in rounds."""
        return 1

    def refuses(self, stages: int, micros: int) -> str | None:
        """Returns why it cannot order so many micro-batches, with a remedy; or None."""
        return None

    @abstractmethod
    def actions(self, stage: int, stages: int, micros: int) -> list[Action]:
        """Returns the passes of a stage over the micro-batches of a batch, in order."""
