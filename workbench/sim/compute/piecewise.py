"""The compute of one virtual rank on parts of a model: batches that rise and fall piece by piece, and sub-models.

With sizes only, each piece counts as keeping as much as any other, because the memory of parts is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from workbench.host.memory import memory
from workbench.host.passes.piecewise import PiecewisePass
from workbench.host.passes.pipelining import name_pass
from workbench.host.passes.submodel_training import SubModelTraining
from workbench.rank import Op, StrategyError
from workbench.sim.clock.fiber import Fiber
from workbench.sim.compute.model import ModelPerformer


class PiecewisePerformer(ModelPerformer):
    """The part of a Host that computes parts of a model. narrowing: of its session"""

    narrowing: SubModelTraining
    _counted: tuple[Any, int, int] = None, 0, 0  # a state, its number of entries, and their bytes

    @cached_property
    def piecewise_pass(self) -> PiecewisePass:
        return PiecewisePass(self.body.model, self.body.learner)

    def _count_pieces(self, fiber: Fiber, op: Op) -> Any:
        return self.piecewise_pass.count_pieces(*op.args)

    def _piece_forward(self, fiber: Fiber, op: Op) -> Any:
        micro, piece, of, falls = op.args
        loss = None
        if self.world.real:
            loss = self.body.piece_forward(self.piecewise_pass, micro, piece, of, falls)
        else:
            self.body.taken_batches += piece == 0
            self.body.opened[0] += 1 / of
            self.ledger.note_forward()
        return self._run_piece(fiber, "forward", loss, micro, piece, of)

    def _piece_backward(self, fiber: Fiber, op: Op) -> Any:
        micro, piece, of, grad = op.args
        if self.world.real:
            with self.ledger.measure_backward(False), torch.enable_grad():
                self.piecewise_pass.piece_backward(micro, piece, of, grad)
        else:
            self.body.opened[0] -= 1 / of
            self.body.came = False
        return self._run_piece(fiber, "backward", None, micro, piece, of)

    def _run_piece(self, fiber: Fiber, phase: str, value: Any, micro: int, piece: int, of: int) -> Any:
        return self._run_phase(
            fiber, phase, value, self.piecewise_pass.estimate_share(piece, of), name_pass(phase, micro, piece, of)
        )

    def _narrow_model(self, fiber: Fiber, op: Op) -> Any:
        if self.world.real and self.body.list_open():
            raise StrategyError("narrow: a forward is open; ask for its backward first")
        share = self.narrowing.switch_to(*op.args)
        self.ledger.note_submodel(self.narrowing.own_params)
        return share

    def _step_narrow(self, clip: float, by: Callable[[], None] | None) -> float | None:
        """Steps a sub-model's optimizer. Returns the norm of its gradient if that is clipped."""
        if self.world.real:
            with torch.enable_grad():
                norm = self.narrowing.step_optimizer(clip, by)
            self.ledger.note_submodel(self.narrowing.own_params, self.narrowing.optimizer_state)
            return norm
        self.body.came = None
        self.ledger.note_submodel(
            self.narrowing.own_params, round(self._count_slot_bytes() * self.narrowing.compute_share("update"))
        )
        return None

    def _count_slot_bytes(self) -> int:
        """Returns the bytes of the whole model's optimizer state. Counts again if the state has changed."""
        state = self.body.optimizer.state
        entries = sum(map(len, state.values()))
        if self._counted[0] is not state or self._counted[1] != entries:
            self._counted = state, entries, memory.count_bytes(memory.find_optimizer_state(self.body.optimizer))
        return self._counted[2]
