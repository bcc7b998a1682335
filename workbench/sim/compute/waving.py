"""The compute of one virtual rank on parts of a model: batches that rise and fall piece by piece, and sub-models.

With sizes only, each piece counts as keeping as much as any other, because the memory of parts is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from workbench.host.memory import memory
from workbench.host.passes.narrowing import Narrowing
from workbench.host.passes.pipelining import pass_name
from workbench.host.passes.waves import Waves
from workbench.rank import Op, StrategyError
from workbench.sim.clock.fiber import Fiber
from workbench.sim.compute.compute import Compute


class Waving(Compute):
    """The part of a Host that computes parts of a model. narrowing: of its session"""

    narrowing: Narrowing
    _counted: tuple[Any, int, int] = None, 0, 0  # a state, its number of entries, and their bytes

    @cached_property
    def waves(self) -> Waves:
        return Waves(self.body.model, self.body.learner)

    def _pieces(self, fiber: Fiber, op: Op) -> Any:
        return self.waves.count(*op.args)

    def _rise(self, fiber: Fiber, op: Op) -> Any:
        micro, piece, of, falls = op.args
        loss = None
        if self.world.real:
            loss = self.body.rise(self.waves, micro, piece, of, falls)
        else:
            self.body.taken += piece == 0
            self.body.opened[0] += 1 / of
            self.ledger.forward()
        return self._pass(fiber, "forward", loss, micro, piece, of)

    def _fall(self, fiber: Fiber, op: Op) -> Any:
        micro, piece, of, grad = op.args
        if self.world.real:
            with self.ledger.backward(False), torch.enable_grad():
                self.waves.fall(micro, piece, of, grad)
        else:
            self.body.opened[0] -= 1 / of
            self.body.came = False
        return self._pass(fiber, "backward", None, micro, piece, of)

    def _pass(self, fiber: Fiber, phase: str, value: Any, micro: int, piece: int, of: int) -> Any:
        return self._compute(fiber, phase, value, self.waves.share(piece, of), pass_name(phase, micro, piece, of))

    def _narrow(self, fiber: Fiber, op: Op) -> Any:
        if self.world.real and self.body.opened():
            raise StrategyError("narrow: a forward is open; ask for its backward first")
        share = self.narrowing.to(*op.args)
        self.ledger.part(self.narrowing.trained)
        return share

    def _step_narrow(self, clip: float, by: Callable[[], None] | None) -> float | None:
        """Steps a sub-model's optimizer. Returns the norm of its gradient if that is clipped."""
        if self.world.real:
            with torch.enable_grad():
                norm = self.narrowing.step(clip, by)
            self.ledger.part(self.narrowing.trained, self.narrowing.state)
            return norm
        self.body.came = None
        self.ledger.part(self.narrowing.trained, round(self._remembers() * self.narrowing.share("update")))
        return None

    def _remembers(self) -> int:
        """Returns the bytes of the whole model's optimizer state. Counts again if the state has changed."""
        state = self.body.optimizer.state
        entries = sum(map(len, state.values()))
        if self._counted[0] is not state or self._counted[1] != entries:
            self._counted = state, entries, memory.nbytes(memory.optimizer_state(self.body.optimizer))
        return self._counted[2]
