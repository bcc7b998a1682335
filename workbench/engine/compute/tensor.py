"""Passes of ranks that hold slices of each matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.pass_timer import PassTimer
from workbench.host.core.drive import drive_coroutine
from workbench.host.passes.checkpointing import CheckpointedUnits
from workbench.host.passes.coded_exchange import MeetingKind
from workbench.host.passes.pipelining import require_same_batch
from workbench.host.passes.tensor_autograd import perform_meeting
from workbench.host.passes.tensor_parallel import TensorParallelGroup, refresh_common
from workbench.host.passes.tensor_schedule import PassPlan, PlannedMeeting
from workbench.host.placement.tensor_split import TensorSplit
from workbench.rank import Op


class TensorPerformer:
    """Computes with the ranks that hold the other slices, and recomputes units in backward.

    group: this rank's slices in a pass; None while it holds whole matrices
    """

    def __init__(self, parts: ComputeParts, timing: PassTimer, perform: Callable[[Op], Any],
                 perform_in_pass: Callable[[Op], Any]) -> None:  # fmt: skip
        self._parts, self._timing = parts, timing
        self._perform, self._perform_in_pass = perform, perform_in_pass
        self._rank, self._at, self._chip = parts.rank, parts.at, parts.lane.chip
        self.group: TensorParallelGroup | None = None
        self._plans: tuple[PassPlan, ...] = ()  # by piece of this rank: when ranks meet
        self._recomputed: tuple[float, ...] = ()  # by piece: the share of its forward that backward recomputes
        self._checkpointed: CheckpointedUnits | None = None
        self._plan: list[PlannedMeeting] = []  # of the present pass
        self._met = 0
        self._stale = True  # whether common parameters may have changed since the last refresh
        self._refreshed_at = -1  # a step
        self._fresh = False  # whether the next batch is the first, which ranks must compare

    def take_slices(self, split: TensorSplit | None, index: int, seed: int) -> None:
        """Gives this rank slices of each matrix; if `split` is None, whole matrices."""
        self._stop_recomputing()
        if self.group is not None:
            self.group.restore_modules()
        self.group = None
        if split is not None:
            coded = self._timing.run_codec
            self.group = TensorParallelGroup(self._parts.model, split, index, self._meet_group, seed=seed, coded=coded)
        self._plan, self._fresh, self._stale = [], True, True

    def tune_partition(self, plans: tuple[PassPlan, ...], units: list[nn.Module], again: tuple[float, ...]) -> None:
        """Applies the partition's present knobs.

        plans: by piece of the model, as far as they are known
        units: units that backward recomputes; again: by piece, their share of its forward
        """
        partition = self._parts.experiment().partition
        self._plans, self._recomputed = plans, again
        self._stop_recomputing()
        if units:
            self._checkpointed = CheckpointedUnits(units, partition.recompute[0])
        if self.group is not None:
            self.group.coding = partition.inside(self._rank.memory)

    def _stop_recomputing(self) -> None:
        if self._checkpointed is not None:
            self._checkpointed.restore_forwards()
        self._checkpointed = None

    def recomputed_share(self, phase: str, chunk: int = 0) -> float:
        return self._recomputed[chunk] if phase == "backward" and chunk < len(self._recomputed) else 0.0

    def mark_stale(self) -> None:
        self._stale = True

    def meet_before(self, batch: Any) -> None:
        """Makes common parameters equal on a replica's ranks, and checks that they read the same batch."""
        if self._fresh and self._rank.mesh.inside:
            like = require_same_batch(self._rank.inside, batch, next(self._parts.model.parameters()).device)
            drive_coroutine(like, self._perform, self._parts.alone)
        self._fresh = False
        if self.group is not None and (self._stale or self._refreshed_at != self._rank.step):
            self.refresh_common()
            self._stale, self._refreshed_at = False, self._rank.step

    def refresh_common(self) -> None:
        """Copies parameters that another rank of the group updates."""
        assert self.group is not None
        self._stale = True
        drive_coroutine(refresh_common(self._rank.group("tensor"), self.group.common), self._perform, self._parts.alone)

    def begin_pass(self, phase: str, chunk: int = 0) -> None:
        self._met = 0
        self._plan = self._plans[chunk].meetings_of_phase(phase) if chunk < len(self._plans) else []

    def _meet_group(self, meeting: MeetingKind, x: Tensor) -> Tensor:
        """Runs inside torch; for a GPU's backward, on autograd's thread."""
        number, self._met = self._met, self._met + 1
        with self._chip.use_stream(), torch.inference_mode(False), torch.no_grad():
            around = self._at.now
            if number < len(self._plan) and self._parts.unsharder.phase != "evaluation":
                self._timing.reach_fraction(self._plan[number].share)
            meet = perform_meeting(self._rank.group("tensor"), meeting, x)
            made: Tensor = drive_coroutine(meet, self._perform_in_pass, self._parts.alone)
            self._at(*around[:2])
        return made
