"""The whole contract of a schedule: what each stage of a pipeline computes, in order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from workbench.settings import Family


class Action(NamedTuple):
    """A pass of one micro-batch through a stage: "F", its forward, or "B", its backward."""

    what: str
    micro: int

    def __str__(self) -> str:
        return f"{self.what}{self.micro}"


def forwards(*micros: int) -> list[Action]:
    """The forwards of these micro-batches, one after the other."""
    return [Action("F", micro) for micro in micros]


def backwards(*micros: int) -> list[Action]:
    """The backwards of these micro-batches, one after the other."""
    return [Action("B", micro) for micro in micros]


@dataclass(frozen=True, kw_only=True)
class Schedule(Family):
    """In which order a stage computes. A pass begins once what it needs has come from the stage before or after.

    Every micro-batch goes forward once and then backward once, backwards in their order: so gradients add up alike.
    """

    home: ClassVar[str] = "workbench.partitions.schedules"

    @abstractmethod
    def actions(self, stage: int, stages: int, micros: int) -> list[Action]:
        """What stage number `stage` of `stages` computes of `micros` micro-batches, in order."""
