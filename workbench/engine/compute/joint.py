"""What a rank computes on the engine where it has slices of each matrix: passes that stop where ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.compute.step_end import StepEnd
from workbench.host.core.drive import drive
from workbench.host.passes.across import met
from workbench.host.passes.checkpointing import Checkpointed
from workbench.host.passes.coded import Combining
from workbench.host.passes.meetings import Planned, Plans
from workbench.host.passes.pipelining import same_batch
from workbench.host.passes.together import Together, refreshed
from workbench.host.placement.splitting import Split
from workbench.partitions import Partition
from workbench.rank import Op


class Joint(StepEnd):
    """The part of a Host that computes together with others, while `together` is there."""

    alone: AbstractContextManager[Any]
    model: nn.Module
    partition: Callable[[], Partition]  # the experiment's, as it is now
    reading: Any
    _coded: Callable[[str, Callable[[], Any], int], Any]
    together: Together | None = None
    _perform: Callable[[Op], Any]
    _while_reading: Callable[[Op], Any]
    _plans: tuple[Plans, ...] = ()  # by piece of the model here, when ranks meet
    _recomputed: tuple[float, ...] = ()  # by piece, of its forward what its backward computes again
    _checkpointed: Checkpointed | None = None
    _plan: list[Planned]  # of the pass under way
    _met = 0  # meetings so far in it
    stale = True  # may parameters have changed since all that have them were told?
    _told = -1  # in which step they were
    _fresh = False  # is the next batch the first, of which nobody knows whether all read the same?

    def deal(self, split: Split | None, index: int, seed: int) -> None:
        """This rank has such slices from now on, or all of each matrix."""
        self._keep_all()
        if self.together is not None:
            self.together.undo()
        self.together = None
        if split is not None:
            self.together = Together(self.model, split, index, self._ask, seed=seed, coded=self._coded)
        self._plan, self._fresh, self.stale = [], True, True

    def tune(self, plans: tuple[Plans, ...], units: list[nn.Module], again: tuple[float, ...]) -> None:
        """The partition may have other knobs now.

        plans: by piece of the model, as far as is known
        units: those that backward computes again; again: by piece, how much of its forward they are
        """
        self._plans, self._recomputed = plans, again
        self._keep_all()
        if units:
            self._checkpointed = Checkpointed(units, self.partition().recompute[0])
        if self.together is not None:
            self.together.coding = self.partition().inside(self.rank.memory)

    def _keep_all(self) -> None:
        """No unit is computed again."""
        if self._checkpointed is not None:
            self._checkpointed.undo()
        self._checkpointed = None

    def again(self, phase: str, chunk: int = 0) -> float:
        """Of a piece's forward, what a pass through it computes again."""
        return self._recomputed[chunk] if phase == "backward" and chunk < len(self._recomputed) else 0.0

    def meet_before(self, batch: Any) -> None:
        """Before a batch: the ranks of a replica have the same of what lies on several of them, and read the same."""
        if self._fresh and self.rank.mesh.inside:
            like = same_batch(self.rank.inside, batch, next(self.model.parameters()).device)
            drive(like, self._perform, self.alone)
        self._fresh = False
        if self.together is not None and (self.stale or self._told != self.rank.step):
            self.refresh(self.together)
            self.stale, self._told = False, self.rank.step

    def refresh(self, together: Together) -> None:
        """What another rank of the group looks after is here as it is now."""
        self.stale = True
        drive(refreshed(self.rank.group("tensor"), together.common), self._perform, self.alone)

    def begin_pass(self, phase: str, chunk: int = 0) -> None:
        """A pass begins, through one of the pieces of the model that lie here."""
        self._met = 0
        self._plan = self._plans[chunk].of(phase) if chunk < len(self._plans) else []

    def _ask(self, meeting: Combining, x: Tensor) -> Tensor:
        """Meets the others of the group. Called inside of torch, and for a GPU's backward on autograd's thread."""
        number, self._met = self._met, self._met + 1
        with self.lane.chip.inside(), torch.inference_mode(False), torch.no_grad():
            around = self.at.now
            if number < len(self._plan) and self.reading.phase != "evaluation":
                self.paced(self._plan[number].share)
            made: Tensor = drive(met(self.rank.group("tensor"), meeting, x), self._while_reading, self.alone)
            self.at(*around[:2])
        return made
