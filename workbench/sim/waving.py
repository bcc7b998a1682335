"""What one virtual rank computes piece by piece: batches that rise and fall in turn.

With sizes only a piece is taken to keep as much as any other, for what a part keeps is not known.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from workbench.host.pipelining import pass_name
from workbench.host.waves import Waves
from workbench.rank import Op
from workbench.sim.compute import Compute
from workbench.sim.fiber import Fiber


class Waving(Compute):
    """The part of a Host that does."""

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
