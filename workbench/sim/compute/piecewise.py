"""A virtual rank's compute on parts of a model: batches that rise and fall piece by piece, and sub-models.

With sizes only, all pieces keep equal memory, because the memory of parts is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from workbench.host.memory import storages as memory
from workbench.host.passes.piecewise import PiecewisePass
from workbench.host.passes.pipelining import name_pass
from workbench.rank import Op, StrategyError
from workbench.sim.clock.fiber import Fiber
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.pass_timer import PassTimer


class PiecewisePerformer:
    """Computes parts of a model."""

    def __init__(self, parts: ComputeParts, timing: PassTimer) -> None:
        self._parts, self._body, self._timing = parts, parts.body, timing
        self._memory_account, self._submodel = parts.memory_account, parts.submodel
        self._counted: tuple[Any, int, int] = None, 0, 0  # a state, its entries, their bytes

    @cached_property
    def piecewise_pass(self) -> PiecewisePass:
        return PiecewisePass(self._body.model, self._body.learner)

    def count_pieces(self, fiber: Fiber, op: Op) -> Any:
        return self.piecewise_pass.count_pieces(*op.args)

    def piece_forward(self, fiber: Fiber, op: Op) -> Any:
        micro, piece, of, falls = op.args
        loss = None
        if self._parts.world.real:
            loss = self._body.piece_forward(self.piecewise_pass, micro, piece, of, falls)
        else:
            self._body.taken_batches += piece == 0
            self._body.opened[0] += 1 / of
            self._memory_account.note_forward()
        return self._run_piece(fiber, "forward", loss, micro, piece, of)

    def piece_backward(self, fiber: Fiber, op: Op) -> Any:
        micro, piece, of, grad = op.args
        if self._parts.world.real:
            with self._memory_account.measure_backward(False), torch.enable_grad():
                self.piecewise_pass.piece_backward(micro, piece, of, grad)
        else:
            self._body.opened[0] -= 1 / of
            self._body.came = False
        return self._run_piece(fiber, "backward", None, micro, piece, of)

    def _run_piece(self, fiber: Fiber, phase: str, value: Any, micro: int, piece: int, of: int) -> Any:
        return self._timing.run_phase(
            fiber, phase, value, self.piecewise_pass.estimate_share(piece, of), name_pass(phase, micro, piece, of)
        )

    def narrow_model(self, fiber: Fiber, op: Op) -> Any:
        if self._parts.world.real and self._body.list_open():
            raise StrategyError("narrow: a forward is open; ask for its backward first")
        share = self._submodel.switch_to(*op.args)
        self._memory_account.note_submodel(self._submodel.own_params)
        return share

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
