"""What a rank computes on the engine where it has slices of each matrix: passes that stop where ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.step_end import StepEnd
from workbench.host.drive import drive
from workbench.host.layout import Layout
from workbench.host.meetings import Planned, Plans
from workbench.host.pipelining import same_batch
from workbench.host.splitting import Split
from workbench.host.together import Meeting, Together, met, refreshed
from workbench.rank import Op


class Joint(StepEnd):
    """The part of a Host that computes together with others, while `together` is there."""

    alone: AbstractContextManager[Any]
    layout: Layout
    model: nn.Module
    reading: Any
    together: Together | None = None
    _perform: Callable[[Op], Any]
    _while_reading: Callable[[Op], Any]
    _plans: dict[str, list[Planned]]
    _number = 0  # meetings so far in the pass under way
    _unlike = False  # is the next batch the first, of which nobody knows whether all read the same?

    def deal(self, split: Split | None, index: int, plans: Plans) -> None:
        """This rank has such slices from now on, or all of each matrix. plans: when ranks meet, as far as is known"""
        if self.together is not None:
            self.together.undo()
        self.together = None if split is None else Together(self.model, split, index, self._ask)
        self._plans = {phase: plans.of(phase, self.layout) for phase in ("forward", "backward")}
        self._unlike = True

    def meet_before(self, batch: Any) -> None:
        """Before a forward: all have the same of what lies on each of them, and read the same batch."""
        self._number = 0
        if self.together is None:
            return
        group = self.rank.group("tensor")
        if self._unlike:
            drive(same_batch(group, batch, next(self.model.parameters()).device), self._perform, self.alone)
            self._unlike = False
        self.refresh()

    def refresh(self) -> None:
        """What another rank of the group looks after is here as it is now."""
        assert self.together is not None
        told = refreshed(self.rank.group("tensor"), self.model, self.together.split)
        drive(told, self._perform, self.alone)

    def begin_backward(self) -> None:
        """A backward begins, which counts its meetings anew."""
        self._number = 0

    def _ask(self, meeting: Meeting, x: Tensor) -> Tensor:
        """Meets the others of the group. Called inside of torch, and for a GPU's backward on autograd's thread."""
        phase, number = self.reading.phase, self._number
        self._number += 1
        with self.lane.chip.inside(), torch.inference_mode(False), torch.no_grad():
            around = self.at.now
            if number < len(plan := self._plans.get(phase, ())):
                self.paced(plan[number].share)
            made: Tensor = drive(met(self.rank.group("tensor"), meeting, x), self._while_reading, self.alone)
            self.at(*around[:2])
        return made
