"""A virtual rank's compute on parts of a model: batches that rise and fall piece by piece, and sub-models.

With sizes only, all pieces keep equal memory, because the memory of parts is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn

from workbench.host.memory import storages as memory
from workbench.host.passes.piecewise import PiecewisePass
from workbench.host.passes.pipelining import name_pass
from workbench.host.passes.submodel_training import SubModelTraining
from workbench.sim.clock.fiber import Fiber
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.pass_timer import PassTimer


class PiecewiseCompute:
    """What a rank does around a pass through a part of its model. See SubModelPerformer."""

    def __init__(self, parts: ComputeParts, timing: PassTimer) -> None:
        self._parts, self._body, self._timing = parts, parts.body, timing
        self._memory_account, self._submodel = parts.memory_account, parts.submodel
        self._counted: tuple[Any, int, int] = None, 0, 0  # a state, its entries, their bytes

    @cached_property
    def piecewise_pass(self) -> PiecewisePass:
        return PiecewisePass(self._body.model, self._body.learner)

    @property
    def submodel(self) -> SubModelTraining:
        return self._submodel

    @property
    def has_open_loss(self) -> bool:
        return bool(self._parts.world.real and self._body.list_open())

    def count_pieces(self, most: int) -> int:
        return self.piecewise_pass.count_pieces(most)

    def piece_forward(self, micro: int, piece: int, of: int, falls: bool) -> Any:
        """Returns the loss after the last piece; None with sizes only."""
        if self._parts.world.real:
            return self._body.piece_forward(self.piecewise_pass, micro, piece, of, falls)
        self._body.taken_batches += piece == 0
        self._body.opened[0] += 1 / of
        self._memory_account.note_forward()
        return None

    def piece_backward(self, micro: int, piece: int, of: int, grad: float) -> None:
        if self._parts.world.real:
            with self._memory_account.measure_backward(False), torch.enable_grad():
                self.piecewise_pass.piece_backward(micro, piece, of, grad)
        else:
            self._body.opened[0] -= 1 / of
            self._body.came = False

    def answer_piece(self, fiber: Fiber, phase: str, value: Any, micro: int, piece: int, of: int) -> Any:
        """Answers with `value` after the piece's share of the phase."""
        return self._timing.run_phase(
            fiber, phase, value, self.piecewise_pass.estimate_share(piece, of), name_pass(phase, micro, piece, of)
        )

    def note_submodel(self, own_params: list[nn.Parameter]) -> None:
        self._memory_account.note_submodel(own_params)

    def step_narrow(self, clip: float, by: Callable[[], None] | None) -> float | None:
        """Steps a sub-model's optimizer. Returns the norm of a clipped gradient."""
        if self._parts.world.real:
            with torch.enable_grad():
                norm = self._submodel.step_optimizer(clip, by)
            self._memory_account.note_submodel(self._submodel.own_params, self._submodel.optimizer_state)
            return norm
        self._body.came = None
        self._memory_account.note_submodel(
            self._submodel.own_params, round(self._count_slot_bytes() * self._submodel.compute_share("update"))
        )
        return None

    def _count_slot_bytes(self) -> int:
        """Returns the bytes of the whole model's optimizer state."""
        state = self._body.optimizer.state
        entries = sum(map(len, state.values()))
        if self._counted[0] is not state or self._counted[1] != entries:
            self._counted = state, entries, memory.count_bytes(memory.find_optimizer_state(self._body.optimizer))
        return self._counted[2]
