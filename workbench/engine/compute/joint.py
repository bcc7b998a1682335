"""Performs passes of ranks that hold slices of each matrix and meet in the middle of a pass."""

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
    """The part of a Host that computes together with other ranks, if `together` is set."""

    alone: AbstractContextManager[Any]
    model: nn.Module
    partition: Callable[[], Partition]  # the experiment's present one
    reading: Any
    _coded: Callable[[str, Callable[[], Any], int], Any]
    together: Together | None = None
    _perform: Callable[[Op], Any]
    _while_reading: Callable[[Op], Any]
    _plans: tuple[Plans, ...] = ()  # by piece of the model on this rank: when ranks meet
    _recomputed: tuple[float, ...] = ()  # by piece: the share of its forward that backward computes again
    _checkpointed: Checkpointed | None = None
    _plan: list[Planned]  # of the present pass
    _met = 0  # meetings so far in the present pass
    stale = True  # whether common parameters may have changed since the last refresh
    _told = -1  # the step of the last refresh
    _fresh = False  # whether the next batch is the first, which ranks must compare

    def deal(self, split: Split | None, index: int, seed: int) -> None:
        """Gives this rank slices of each matrix, or whole matrices if `split` is None."""
        self._keep_all()
        if self.together is not None:
            self.together.undo()
        self.together = None
        if split is not None:
            self.together = Together(self.model, split, index, self._ask, seed=seed, coded=self._coded)
        self._plan, self._fresh, self.stale = [], True, True

    def tune(self, plans: tuple[Plans, ...], units: list[nn.Module], again: tuple[float, ...]) -> None:
        """Applies the partition's present knobs.

        plans: by piece of the model, as far as they are known
        units: units that backward computes again; again: by piece, their share of its forward
        """
        self._plans, self._recomputed = plans, again
        self._keep_all()
        if units:
            self._checkpointed = Checkpointed(units, self.partition().recompute[0])
        if self.together is not None:
            self.together.coding = self.partition().inside(self.rank.memory)

    def _keep_all(self) -> None:
        """Stops recomputing units."""
        if self._checkpointed is not None:
            self._checkpointed.undo()
        self._checkpointed = None

    def again(self, phase: str, chunk: int = 0) -> float:
        """Returns the share of a piece's forward that a pass through it computes again."""
        return self._recomputed[chunk] if phase == "backward" and chunk < len(self._recomputed) else 0.0

    def meet_before(self, batch: Any) -> None:
        """Makes common parameters equal on a replica's ranks, and checks that they read the same batch."""
        if self._fresh and self.rank.mesh.inside:
            like = same_batch(self.rank.inside, batch, next(self.model.parameters()).device)
            drive(like, self._perform, self.alone)
        self._fresh = False
        if self.together is not None and (self.stale or self._told != self.rank.step):
            self.refresh(self.together)
            self.stale, self._told = False, self.rank.step

    def refresh(self, together: Together) -> None:
        """Copies the present values of parameters that another rank of the group updates."""
        self.stale = True
        drive(refreshed(self.rank.group("tensor"), together.common), self._perform, self.alone)

    def begin_pass(self, phase: str, chunk: int = 0) -> None:
        """Begins a pass through one of this rank's pieces of the model."""
        self._met = 0
        self._plan = self._plans[chunk].of(phase) if chunk < len(self._plans) else []

    def _ask(self, meeting: Combining, x: Tensor) -> Tensor:
        """Meets the other ranks of the group. Runs inside torch; for a GPU's backward, on autograd's thread."""
        number, self._met = self._met, self._met + 1
        with self.lane.chip.inside(), torch.inference_mode(False), torch.no_grad():
            around = self.at.now
            if number < len(self._plan) and self.reading.phase != "evaluation":
                self.paced(self._plan[number].share)
            made: Tensor = drive(met(self.rank.group("tensor"), meeting, x), self._while_reading, self.alone)
            self.at(*around[:2])
        return made
